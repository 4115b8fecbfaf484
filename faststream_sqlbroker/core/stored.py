"""Stored messages as operators see them, live or archived.

Times are the database's (aware, UTC).
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from faststream_sqlbroker.core.settle import DEAD_LETTER
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import Explanation, format_error


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message of the tables."""

    id: int
    queue: str
    state: MessageState
    priority: int
    key: str | None
    dedup_id: str | None
    attempts_count: int
    deliveries_count: int
    publish_count: int
    origin_id: int | None
    """Id of the message that was replayed as this one."""
    created_at: datetime
    next_attempt_at: datetime
    expires_at: datetime | None
    first_attempt_at: datetime | None
    """End of the first attempt."""
    last_attempt_at: datetime | None
    """End of the last attempt."""
    acquired_at: datetime | None
    """Time of the last claim."""
    last_error: str | None
    lease_expires_at: datetime | None = None
    worker: str | None = None
    """Subscriber that has the lease, with its name in `admin.subscribers`; None if unknown."""
    archived_at: datetime | None = None
    reason: str | None = None
    """Reason for the end; docs/reference/reasons.md lists the codes."""
    related_id: int | None = None
    """Id of the message that the reason refers to."""
    error_fingerprint: str | None = None
    """Fingerprint of the last error, by which `admin.dead_letters` groups messages."""
    headers: Mapping[str, Any] | None = None
    """None if headers were not requested."""
    body: Any = None
    """None if the body was not requested; else decoded JSON, text, or bytes."""


class InvalidCursorError(ValueError):
    """`after` was not returned by a page of the same list."""


Redact = Callable[[StoredMessage], StoredMessage]
"""Changes a message with its headers and body before anybody sees it."""


@dataclass(frozen=True, slots=True)
class MessagePage:
    """A page of messages."""

    messages: tuple[StoredMessage, ...]
    after: str | None
    """Pass this as `after` to get the next page; None on the last page."""
    scanned_until: datetime | None = None
    """If the page ended before it was full, after scanning 20 000 messages: the time of the last
    one (creation or archiving). The next page continues there."""


@dataclass(frozen=True, slots=True)
class Event:
    """A past or future event of a message."""

    at: datetime
    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a handler, as reported by the handler."""

    fraction: float
    """From 0 to 1."""
    text: str | None
    at: datetime
    """Time of the report."""


@dataclass(frozen=True, slots=True)
class MessageDetail:
    """A message with all available details."""

    message: StoredMessage
    history: tuple[Event, ...]
    """Events by time, the oldest first."""
    explanation: Explanation
    """The reasons for the message's state."""
    came_from: Mapping[str, Any] | None = None
    """Origin of a dead letter: its queue, reason, error, attempts and deliveries there. A producer
    can write the same header."""
    progress: Progress | None = None
    """Progress of the running handler; None if it reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Conditions for listed messages; None matches every message."""

    archived: bool = False
    ids: Sequence[int] = ()
    """Only these ids; empty matches every id."""
    queue: str | None = None
    state: MessageState | None = None
    key: str | None = None
    error: str | None = None
    reason: str | None = None
    fingerprint: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    since: datetime | float | None = None
    """A time, or seconds before the database's now."""
    until: datetime | float | None = None


def decode_body(payload: bytes, headers: Mapping[str, Any]) -> Any:
    """Decode the body by its content type: JSON or text; bytes for other types and invalid bodies.

    This is for the display to operators. Without a content type, a body that is JSON is decoded.
    """
    kind = str(headers.get("content-type", "application/json"))
    with contextlib.suppress(ValueError, RecursionError):
        if "json" in kind:
            return json.loads(payload)
        if kind.startswith("text/"):
            return payload.decode()
    return payload


def build_history(message: StoredMessage) -> tuple[Event, ...]:
    """Build the past and future events of a message from the stored row.

    The row only has the times of the first and the last attempt, so attempts between are missing.
    """
    row = message
    suffix = "" if row.origin_id is None else f", as a replay of message {row.origin_id}"
    events = [Event(row.created_at, f"published{suffix}")]
    if row.first_attempt_at is not None and row.first_attempt_at != row.last_attempt_at:
        events.append(Event(row.first_attempt_at, "the first attempt ended"))
    if row.last_attempt_at is not None:
        text = f"attempt {row.attempts_count} ended" if row.attempts_count else "a handler ended"
        events.append(Event(row.last_attempt_at, text + format_error(row.last_error)))
    if row.archived_at is None:
        events += _list_open_events(row)
    else:
        reason = "" if row.reason is None else f": {row.reason}"
        related = "" if row.related_id is None else f", by message {row.related_id}"
        events.append(Event(row.archived_at, f"archived as {row.state.name}{reason}{related}"))
    # MySQL's drivers return a zero date as None; another program may have written one.
    return tuple(
        sorted((event for event in events if event.at is not None), key=lambda event: event.at)
    )


def _list_open_events(row: StoredMessage) -> list[Event]:
    """Return the claim and the expected events of a live message: end of lease, due, expiry."""
    events = []
    if row.state is MessageState.PROCESSING:
        if row.acquired_at is not None:
            worker = row.worker or "an unlisted subscriber"
            events.append(
                Event(row.acquired_at, f"claimed by {worker}, delivery {row.deliveries_count}")
            )
        if row.lease_expires_at is not None:
            events.append(Event(row.lease_expires_at, "the lease expires unless it is renewed"))
    else:
        events.append(Event(row.next_attempt_at, "due"))
    if row.expires_at is not None:
        events.append(Event(row.expires_at, "expires"))
    return events


def get_dead_letter_origin(headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the origin of a dead letter from the header, or None."""
    value = (headers or {}).get(DEAD_LETTER)
    return value if isinstance(value, dict) else None
