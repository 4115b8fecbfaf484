"""What a test is told of: attempts, failures, what waits, what was published.

A mock that fails says what waits.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

from faststream.message import decode_message

from faststream_sqlbroker.adapter.testing import CallRecorder
from faststream_sqlbroker.call_assertions import naming_what_waits
from faststream_sqlbroker.core.times import from_microseconds


class NamingMock(MagicMock):
    """A MagicMock; a failed assertion of a call names the messages that wait, and until when."""

    def _get_child_mock(self, /, **options: Any) -> MagicMock:
        return MagicMock(**options)


def _naming(name: str) -> Callable[..., None]:
    check = getattr(MagicMock, name)

    @wraps(check)
    def assertion(mock: NamingMock, /, *args: Any, **kwargs: Any) -> None:
        with naming_what_waits(mock):
            check(mock, *args, **kwargs)

    return assertion


for _name in (
    "assert_called",
    "assert_called_once",
    "assert_called_with",
    "assert_called_once_with",
    "assert_any_call",
):
    setattr(NamingMock, _name, _naming(_name))


def name_what_waits(recorder: CallRecorder, describe: Callable[[], str]) -> None:
    """Let failed assertions on the calls that `recorder` knows end with what `describe` says."""
    if not isinstance(recorder.mock, NamingMock):
        recorder.mock = NamingMock()
    recorder.mock.__dict__["what_waits"] = describe


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a handler on one message."""

    message_id: int
    queue: str
    attempt: int
    """1 for the first."""
    outcome: str
    """"ack", "nack", "reject", …: what the delivery ended in (see the glossary)."""
    error: BaseException | None
    """What the handler has raised."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that is neither finished nor being handled."""

    message_id: int
    queue: str
    until: datetime
    """When it is due; or when its lease ends, if something holds it."""
    attempts: int
    """How often a handler has run for it."""
    why: str
    """In words: what it waits for."""

    def __str__(self) -> str:
        """As failed assertions show it."""
        return f"message {self.message_id} in queue {self.queue!r} {self.why}"


@dataclass(frozen=True, slots=True)
class Drained:
    """What `drain` has found."""

    ran: list[Attempt]
    """Attempts since the last `drain`, in order."""
    waiting: list[Waiting]
    """By due time, priority, id."""

    @property
    def failed(self) -> list[Attempt]:
        """The attempts that raised."""
        return [attempt for attempt in self.ran if attempt.error is not None]


@dataclass(frozen=True, slots=True)
class Published:
    """A message as it was published."""

    id: int
    queue: str
    body: Any
    """Decoded by its content type; bytes if that is not possible."""
    payload: bytes
    """As it is stored."""
    headers: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    priority: int = 0
    dedup_id: str | None = None
    delay: float = 0.0
    """Seconds from its publish until it was due."""
    due_at: datetime | None = None
    expires_at: datetime | None = None
    correlation_id: str | None = None
    reply_to: str = ""


def published(row: Any) -> Published:
    """What a row of `TestDatabase.published` says."""
    message_id, queue, key, priority, dedup_id, stored, payload, created, due, expires = row
    headers = json.loads(stored) if stored else {}
    message = SimpleNamespace(body=payload, content_type=headers.get("content-type"))
    try:
        body: Any = decode_message(cast("Any", message))
    except ValueError:
        body = payload
    return Published(
        id=message_id,
        queue=queue,
        body=body,
        payload=payload,
        headers=headers,
        key=key,
        priority=priority,
        dedup_id=dedup_id,
        delay=max(0, due - created) / 1_000_000,
        due_at=from_microseconds(due),
        expires_at=None if expires is None else from_microseconds(expires),
        correlation_id=headers.get("correlation_id"),
        reply_to=headers.get("reply_to") or "",
    )
