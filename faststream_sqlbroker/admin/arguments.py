"""Checks of what an operator gives, and the filters that say which messages are meant."""

import getpass
import os
import re
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from faststream_sqlbroker.core.checks import checked_name
from faststream_sqlbroker.core.settle import FINGERPRINT_LENGTH
from faststream_sqlbroker.core.states import ARCHIVED_STATES, MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.core.text import clean_text, short, storable
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

LARGEST_ID = 2**63 - 1
"""The largest value of the id column, a signed integer of 64 bits."""
LONGEST_AGE = 100 * 365 * 86_400.0
"""Seconds; every database knows the time so long ago."""
FIRST_YEAR = 1001
"""Every database knows all moments from its begin on, in any time zone."""
LAST_YEAR = 9998
"""The same until its end."""
MAX_IDS = 1_000
"""Ids of messages that a filter may have."""
LONGEST_TEXT = 1_000
"""Bytes of a reason and of the name of an operator; longer text is cut."""
_ID = re.compile(r"-?[0-9]{1,19}", re.ASCII)
"""An id as text; 2**63 has 19 digits."""


def check_limit(limit: int) -> None:
    """Refuse less than 1.

    Raises:
        ValueError: `limit` is less than 1.
    """
    if limit < 1:
        msg = f"limit must be 1 or more, got {limit!r}"
        raise ValueError(msg)


def moment_or_age(name: str, value: Duration | datetime | None) -> datetime | float | None:
    """Read the argument `name`: a moment, or how many seconds ago.

    Raises:
        SetupError: it is neither an aware datetime nor a length of time of 0 or more.
    """
    if value is None:
        return None
    if isinstance(value, datetime):
        return _aware(name, value)
    seconds = parse_duration(value, name=name)
    if not 0 <= seconds <= LONGEST_AGE:
        raise SetupError(
            f"{name} must be a datetime, or how long ago: 0 to 100 years, got {short(value)}"
        )
    return seconds


def moment_or_delay(name: str, value: Duration | datetime) -> datetime | float:
    """Read the argument `name`: a moment, or in how many seconds.

    Raises:
        SetupError: it is neither an aware datetime that every database can hold nor a length of
            time of 0 or more.
    """
    if isinstance(value, datetime):
        return near(name, value)
    seconds = parse_duration(value, name=name)
    if not 0 <= seconds <= LONGEST_AGE:
        raise SetupError(
            f"{name} must be a datetime, or a duration of 0 to 100 years, got {short(value)}"
        )
    return seconds


def near(name: str, value: datetime) -> datetime:
    """Return `value`, if every database can hold such a moment.

    Raises:
        SetupError: it has no time zone, or is in a year that not every database has.
    """
    if not FIRST_YEAR <= _aware(name, value).year <= LAST_YEAR:
        raise SetupError(
            f"{name} must be in a year from {FIRST_YEAR} to {LAST_YEAR}, got {value.isoformat()}"
        )
    return value


def _aware(name: str, value: datetime) -> datetime:
    if value.tzinfo is None:
        raise SetupError(
            f"{name} needs a time zone, got the naive datetime {value!r}: "
            "use datetime.now(timezone.utc)"
        )
    try:
        return value.astimezone(timezone.utc)
    except OverflowError:
        raise SetupError(
            f"{name} must be in the years 1 to 9999, in UTC, too, got {short(value.isoformat())}"
        ) from None


def filter_text(name: str, value: str | None) -> str | None:
    """Return the text of a filter, if the database can compare with such a text.

    Raises:
        SetupError: `value` is not text, or holds what no database stores as text.
    """
    if value is not None and (not isinstance(value, str) or not storable(value)):
        raise SetupError(
            f"{name} must be text without NUL and without a lone surrogate, got {short(value)}"
        )
    return value


def text_or_none(name: str, value: str | None) -> str | None:
    """Clean and cut the text of the argument `name` for the database.

    Raises:
        SetupError: `value` is not text.
    """
    if value is not None and not isinstance(value, str):
        msg = f"{name} must be text, got {short(value)}"
        raise SetupError(msg)
    return None if value is None else clean_text(value, limit=LONGEST_TEXT)


def message_number(message_id: int | str) -> int:
    """The id of a message, which may be given as text.

    Raises:
        SetupError: `message_id` is not a whole number of 64 bits.
    """
    text = isinstance(message_id, str) and _ID.fullmatch(message_id)
    number = int(message_id) if text else message_id
    if (
        not isinstance(number, int)
        or isinstance(number, bool)
        or not -LARGEST_ID <= number <= LARGEST_ID
    ):
        msg = (
            "message_id must be a whole number of 64 bits, as returned by publish or found in "
            f"message.message_id, got {short(message_id)}"
        )
        raise SetupError(msg)
    return number


def operator_name(by: str | None) -> str:
    """Name the operator for the audit: `by`, or the user and the host, as "ann@web-3".

    Raises:
        SetupError: it is not text.
    """
    return text_or_none("by", by) or f"{_user()}@{socket.gethostname()}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's number without a name
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"


def filters_of(
    *,
    has_archive: bool,
    ids: Sequence[int | str] | None = None,
    queue: str | None = None,
    state: MessageState | str | None = None,
    key: str | None = None,
    error: str | None = None,
    reason: str | None = None,
    fingerprint: str | None = None,
    headers: Mapping[str, str] | None = None,
    since: Duration | datetime | None = None,
    until: Duration | datetime | None = None,
    archived: bool = False,
) -> Filters:
    """The filters that the arguments of `messages` say.

    Raises:
        SetupError: an argument is not valid, or they do not go together.
    """
    wanted = _state(state)
    filters = Filters(
        archived=archived or wanted in ARCHIVED_STATES,
        ids=() if ids is None else _numbers(ids),
        queue=None if queue is None else checked_name(queue),
        state=wanted,
        key=_key(key),
        error=filter_text("error", error),
        reason=filter_text("reason", reason),
        fingerprint=_fingerprint(fingerprint),
        headers=_headers(headers),
        since=moment_or_age("since", since),
        until=moment_or_age("until", until),
    )
    _check_filters(filters, has_archive)
    return filters


def _numbers(ids: Sequence[int | str]) -> tuple[int, ...]:
    # Without ids all messages match, which an empty list of a program does not mean.
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not 1 <= len(ids) <= MAX_IDS:
        raise SetupError(
            f"ids must be a list of 1 to {MAX_IDS} ids of messages, got {short(ids)}: use other "
            "filters for more"
        )
    return tuple(sorted({message_number(each) for each in ids}))


def _state(value: MessageState | str | None) -> MessageState | None:
    if value is None or isinstance(value, MessageState):
        return value
    name = str(value).upper()
    if name not in MessageState.__members__:
        allowed = ", ".join(MessageState.__members__)
        raise SetupError(f"state must be one of {allowed}, got {short(value)}")
    return MessageState[name]


def _key(value: str | None) -> str | None:
    key = filter_text("key", value)
    # MySQL and MariaDB would take it for the key without its spaces.
    if key is not None and key.endswith(" "):
        raise SetupError(f"key must not end in a space, as no key does, got {short(value)}")
    return key


def _fingerprint(value: str | None) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) != FINGERPRINT_LENGTH):
        raise SetupError(
            f"fingerprint must be the {FINGERPRINT_LENGTH} digits that dead_letters shows, "
            f"got {short(value)}"
        )
    return filter_text("fingerprint", value)


def _headers(given: Mapping[str, str] | None) -> Mapping[str, str]:
    if given is not None and not isinstance(given, Mapping):
        raise SetupError(f"headers must map names to texts, got {short(given)}")
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise SetupError(f"headers must map names to texts, got {short(name)}: {short(value)}")
        filter_text("the name of a header", name)
        filter_text(f"the header {short(name)}", value)
    return dict(given or {})


def _check_filters(filters: Filters, has_archive: bool) -> None:
    if filters.archived and not has_archive:
        raise SetupError("there is no archive: message_archive_table_name is None")
    if filters.archived and filters.state is not None and filters.state not in ARCHIVED_STATES:
        raise SetupError(f"no archived message is {filters.state.name}: leave archived=True out")
    for name in ("reason", "fingerprint"):
        if getattr(filters, name) is not None and not filters.archived:
            raise SetupError(f"only archived messages have a {name}: give archived=True, too")
