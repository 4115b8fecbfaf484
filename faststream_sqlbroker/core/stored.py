"""A stored message as operators see it, live or archived. Times are the database's (aware, UTC)."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from faststream_sqlbroker.core.settle import DEAD_LETTER
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import Explanation, error_text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """One message of the tables."""

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
    """The message that it was replayed from."""
    created_at: datetime
    next_attempt_at: datetime
    expires_at: datetime | None
    first_attempt_at: datetime | None
    """When its first attempt ended."""
    last_attempt_at: datetime | None
    """When its last attempt ended."""
    acquired_at: datetime | None
    """When it was last claimed."""
    last_error: str | None
    lease_expires_at: datetime | None = None
    worker: str | None = None
    """The subscriber that has its lease, as `admin.subscribers` names it; None: not known."""
    archived_at: datetime | None = None
    reason: str | None = None
    """Why it ended; docs/reference/reasons.md lists the codes."""
    related_id: int | None = None
    """The message that the reason is about."""
    error_fingerprint: str | None = None
    """What its last error has in common with others: `admin.dead_letters` groups by it."""
    headers: Mapping[str, Any] | None = None
    """None if they were not asked for."""
    body: Any = None
    """None if it was not asked for; else JSON decoded, text, or bytes."""


class NotACursorError(ValueError):
    """`after` is not what a page of the same list returned."""


Redact = Callable[[StoredMessage], StoredMessage]
"""What a message with its headers and body becomes before anybody sees it."""


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Some messages, and how to read on."""

    messages: tuple[StoredMessage, ...]
    after: str | None
    """Give it as `after` to get the next page; None: this is the last."""
    scanned_until: datetime | None = None
    """The page ended before it was full, after 20 000 messages that were looked at: the time of the
    last one (creation or archiving). The next page goes on there."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a message, or will."""

    at: datetime
    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a handler has come, as it says."""

    fraction: float
    """From 0 to 1."""
    text: str | None
    at: datetime
    """When it said so."""


@dataclass(frozen=True, slots=True)
class MessageDetail:
    """One message with all that is known of it."""

    message: StoredMessage
    history: tuple[Event, ...]
    """By time, the oldest first."""
    explanation: Explanation
    """Why it is where it is."""
    came_from: Mapping[str, Any] | None = None
    """Of a dead letter: its queue, reason, error, attempts and deliveries there. A producer can
    write the same."""
    progress: Progress | None = None
    """How far the handler has come that runs now; None: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which messages are listed; None: whichever."""

    archived: bool = False
    ids: Sequence[int] = ()
    """Only these; empty: whichever."""
    queue: str | None = None
    state: MessageState | None = None
    key: str | None = None
    error: str | None = None
    reason: str | None = None
    fingerprint: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    since: datetime | float | None = None
    """A moment, or seconds before the database's now."""
    until: datetime | float | None = None


def decode_body(payload: bytes, headers: Mapping[str, Any]) -> Any:
    """The body by its content type: JSON or text; bytes if it is neither, or is not what it says.

    Without a content type, a body that is JSON is decoded.
    """
    kind = str(headers.get("content-type", "application/json"))
    with contextlib.suppress(ValueError, RecursionError):
        if "json" in kind:
            return json.loads(payload)
        if kind.startswith("text/"):
            return payload.decode()
    return payload


def history(message: StoredMessage) -> tuple[Event, ...]:
    """What the row tells of the message's past and future."""
    m = message
    replayed = "" if m.origin_id is None else f", as a replay of message {m.origin_id}"
    found = [Event(m.created_at, f"published{replayed}")]
    if m.first_attempt_at is not None and m.first_attempt_at != m.last_attempt_at:
        found.append(Event(m.first_attempt_at, "the first attempt ended"))
    if m.last_attempt_at is not None:
        text = f"attempt {m.attempts_count} ended" if m.attempts_count else "a handler ended"
        found.append(Event(m.last_attempt_at, text + error_text(m.last_error)))
    if m.archived_at is None:
        found += _still_to_come(m)
    else:
        why = "" if m.reason is None else f": {m.reason}"
        about = "" if m.related_id is None else f", by message {m.related_id}"
        found.append(Event(m.archived_at, f"archived as {m.state.name}{why}{about}"))
    # MySQL's drivers read a zero date, which another program may have written, as None.
    return tuple(sorted((e for e in found if e.at is not None), key=lambda event: event.at))


def _still_to_come(m: StoredMessage) -> list[Event]:
    found = []
    if m.state is MessageState.PROCESSING:
        if m.acquired_at is not None:
            who = m.worker or "a subscriber that is not listed"
            found.append(Event(m.acquired_at, f"claimed by {who}, delivery {m.deliveries_count}"))
        if m.lease_expires_at is not None:
            found.append(Event(m.lease_expires_at, "the lease runs out unless it is renewed"))
    else:
        found.append(Event(m.next_attempt_at, "due"))
    if m.expires_at is not None:
        found.append(Event(m.expires_at, "expires"))
    return found


def came_from(headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What the header of a dead letter says of its origin."""
    value = (headers or {}).get(DEAD_LETTER)
    return value if isinstance(value, dict) else None
