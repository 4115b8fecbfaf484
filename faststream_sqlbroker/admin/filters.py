"""Validate operators' arguments, and parse filters of messages."""

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from faststream_sqlbroker.core.checks import validate_name
from faststream_sqlbroker.core.correlation import parse_message_id
from faststream_sqlbroker.core.settle import FINGERPRINT_LENGTH
from faststream_sqlbroker.core.states import ARCHIVED_STATES, MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.core.text import clean_text, format_value, is_storable
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

MAX_AGE_SECONDS = 100 * 365 * 86_400.0
"""Seconds; every database supports times so long ago."""
MIN_YEAR = 1001
"""First year that every database supports completely, in any time zone."""
MAX_YEAR = 9998
"""Last year that every database supports completely, in any time zone."""
MAX_IDS = 1_000
"""Maximum number of message ids in a filter."""
MAX_TEXT_BYTES = 1_000
"""Maximum bytes of a reason and of an operator's name; longer text is cut."""


def check_limit(limit: int) -> None:
    """Check that `limit` is at least 1.

    Raises:
        ValueError: `limit` is less than 1.
    """
    if limit < 1:
        msg = f"limit must be 1 or more, got {limit!r}"
        raise ValueError(msg)


def parse_time_or_age(name: str, value: Duration | datetime | None) -> datetime | float | None:
    """Parse the argument `name`: a time, or how many seconds ago; None stays None.

    An age is not converted to a time here, because the database's clock decides.

    Raises:
        SetupError: the value is neither an aware datetime nor a duration of 0 or more.
    """
    if value is None:
        return None
    if isinstance(value, datetime):
        return _to_utc(name, value)
    seconds = parse_duration(value, name=name)
    if not 0 <= seconds <= MAX_AGE_SECONDS:
        raise SetupError(
            f"{name} must be a datetime, or an age of 0 to 100 years, got {format_value(value)}"
        )
    return seconds


def parse_time_or_delay(name: str, value: Duration | datetime) -> datetime | float:
    """Parse the argument `name`: a time, or in how many seconds.

    A delay is not converted to a time here, because the database's clock decides.

    Raises:
        SetupError: the value is neither an aware datetime that every database can hold nor a
            duration of 0 or more.
    """
    if isinstance(value, datetime):
        return validate_datetime(name, value)
    seconds = parse_duration(value, name=name)
    if not 0 <= seconds <= MAX_AGE_SECONDS:
        raise SetupError(
            f"{name} must be a datetime, or a duration of 0 to 100 years, got {format_value(value)}"
        )
    return seconds


def validate_datetime(name: str, value: datetime) -> datetime:
    """Return `value`, if every database can hold such a time.

    Raises:
        SetupError: the value has no time zone, or is in a year that not every database supports.
    """
    if not MIN_YEAR <= _to_utc(name, value).year <= MAX_YEAR:
        raise SetupError(
            f"{name} must be in a year from {MIN_YEAR} to {MAX_YEAR}, got {value.isoformat()}"
        )
    return value


def _to_utc(name: str, value: datetime) -> datetime:
    """Convert the argument `name` to UTC.

    Raises:
        SetupError: the value has no time zone, or UTC's year is outside of Python's range.
    """
    if value.tzinfo is None:
        raise SetupError(
            f"{name} needs a time zone, got the naive datetime {value!r}: "
            "use datetime.now(timezone.utc)"
        )
    try:
        return value.astimezone(timezone.utc)
    except OverflowError:
        raise SetupError(
            f"{name} must be in the years 1 to 9999 in UTC, got {format_value(value.isoformat())}"
        ) from None


def validate_filter_text(name: str, value: str | None) -> str | None:
    """Return the text of a filter, if the database can compare with such a text; None stays None.

    Raises:
        SetupError: `value` is not text, or contains characters that no database stores.
    """
    if value is not None and (not isinstance(value, str) or not is_storable(value)):
        raise SetupError(
            f"{name} must be text without NUL and without a lone surrogate, got "
            f"{format_value(value)}"
        )
    return value


def clean_optional_text(name: str, value: str | None) -> str | None:
    """Clean and cut the text of the argument `name` for the database; None stays None.

    Characters that no database stores are replaced; of text longer than `MAX_TEXT_BYTES` the middle
    is cut out.

    Raises:
        SetupError: `value` is not text.
    """
    if value is not None and not isinstance(value, str):
        msg = f"{name} must be text, got {format_value(value)}"
        raise SetupError(msg)
    return None if value is None else clean_text(value, limit=MAX_TEXT_BYTES)


def get_operator_name(by: str | None) -> str:
    """Return the operator's name for the audit: `by`, or user and host, as "ann@web-3".

    Raises:
        SetupError: `by` is not text.
    """
    return clean_optional_text("by", by) or f"{_get_user()}@{socket.gethostname()}"


def _get_user() -> str:
    """Return the name of the user who runs this process; without a name the user's number."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's number without a name
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"


def parse_filters(
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
    """Parse the arguments of `messages` as filters.

    Raises:
        SetupError: an argument is not valid, or the combination is not.
    """
    parsed_state = _parse_state(state)
    filters = Filters(
        archived=archived or parsed_state in ARCHIVED_STATES,
        ids=() if ids is None else _parse_ids(ids),
        queue=None if queue is None else validate_name(queue),
        state=parsed_state,
        key=_validate_key(key),
        error=validate_filter_text("error", error),
        reason=validate_filter_text("reason", reason),
        fingerprint=_validate_fingerprint(fingerprint),
        headers=_validate_headers(headers),
        since=parse_time_or_age("since", since),
        until=parse_time_or_age("until", until),
    )
    _check_filters(filters, has_archive)
    return filters


def _parse_ids(ids: Sequence[int | str]) -> tuple[int, ...]:
    """Parse and sort the ids of a filter, without duplicates; refuse an empty list."""
    # Trap: a filter without ids matches all messages, which an empty list does not mean.
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not 1 <= len(ids) <= MAX_IDS:
        raise SetupError(
            f"ids must be a list of 1 to {MAX_IDS} message ids, got {format_value(ids)}: use other "
            "filters to select more messages"
        )
    return tuple(sorted({parse_message_id(id_)[0] for id_ in ids}))


def _parse_state(value: MessageState | str | None) -> MessageState | None:
    """Parse a state, or a state's name in any case of letters; None selects all."""
    if value is None or isinstance(value, MessageState):
        return value
    name = str(value).upper()
    if name not in MessageState.__members__:
        allowed = ", ".join(MessageState.__members__)
        raise SetupError(f"state must be one of {allowed}, got {format_value(value)}")
    return MessageState[name]


def _validate_key(value: str | None) -> str | None:
    """Return the key of a filter, if every database compares such a key exactly."""
    key = validate_filter_text("key", value)
    # Trap: MySQL and MariaDB ignore trailing spaces, so another key would match.
    if key is not None and key.endswith(" "):
        raise SetupError(f"key must not end in a space, got {format_value(value)}")
    return key


def _validate_fingerprint(value: str | None) -> str | None:
    """Return the fingerprint, a short hash that errors from one place in the code share."""
    if value is not None and (not isinstance(value, str) or len(value) != FINGERPRINT_LENGTH):
        raise SetupError(
            f"fingerprint must be the {FINGERPRINT_LENGTH} digits that dead_letters shows, "
            f"got {format_value(value)}"
        )
    return validate_filter_text("fingerprint", value)


def _validate_headers(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the headers of a filter, if all names and values are text that can be compared."""
    if headers is not None and not isinstance(headers, Mapping):
        raise SetupError(f"headers must map names to texts, got {format_value(headers)}")
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise SetupError(
                f"headers must map names to texts, got {format_value(name)}: {format_value(value)}"
            )
        validate_filter_text("the name of a header", name)
        validate_filter_text(f"the header {format_value(name)}", value)
    return dict(headers or {})


def _check_filters(filters: Filters, has_archive: bool) -> None:
    """Refuse archive filters without an archive, and filters that no message can match."""
    if filters.archived and not has_archive:
        raise SetupError("this broker has no archive: message_archive_table_name is None")
    if filters.archived and filters.state is not None and filters.state not in ARCHIVED_STATES:
        raise SetupError(f"no archived message is {filters.state.name}: omit archived=True")
    for name in ("reason", "fingerprint"):
        if getattr(filters, name) is not None and not filters.archived:
            raise SetupError(f"only archived messages have a {name}: add archived=True")
