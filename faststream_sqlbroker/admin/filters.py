"""Which messages an operator means."""

from collections.abc import Mapping
from datetime import datetime

from faststream_sqlbroker.admin.arguments import filter_text, moment_or_age, queue_name
from faststream_sqlbroker.core.error_fingerprint import LENGTH
from faststream_sqlbroker.core.states import ARCHIVED_STATES, MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError


def filters_of(
    *,
    has_archive: bool,
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
        queue=None if queue is None else queue_name(queue),
        state=wanted,
        key=_key(key),
        error=filter_text("error", error),
        reason=filter_text("reason", reason),
        fingerprint=_fingerprint(fingerprint),
        headers=_headers(headers),
        since=moment_or_age("since", since),
        until=moment_or_age("until", until),
    )
    _check(filters, has_archive)
    return filters


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
    if value is not None and (not isinstance(value, str) or len(value) != LENGTH):
        raise SetupError(
            f"fingerprint must be the {LENGTH} digits that dead_letters shows, got {short(value)}"
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


def _check(filters: Filters, has_archive: bool) -> None:
    if filters.archived and not has_archive:
        raise SetupError("there is no archive: message_archive_table_name is None")
    if filters.archived and filters.state is not None and filters.state not in ARCHIVED_STATES:
        raise SetupError(f"no archived message is {filters.state.name}: leave archived=True out")
    for name in ("reason", "fingerprint"):
        if getattr(filters, name) is not None and not filters.archived:
            raise SetupError(f"only archived messages have a {name}: give archived=True, too")
