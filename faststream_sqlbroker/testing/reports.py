"""Reports for tests: attempts, failures, waiting and published messages.

A mock that fails describes the waiting messages.
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
from faststream_sqlbroker.call_assertions import add_waiting_messages
from faststream_sqlbroker.core.times import from_microseconds


class ReportingMock(MagicMock):
    """A MagicMock whose failed assertions of calls list the waiting messages, and until when."""

    def _get_child_mock(self, /, **options: Any) -> MagicMock:
        return MagicMock(**options)


def _build_assertion(name: str) -> Callable[..., None]:
    """Wrap an assertion of MagicMock to list the waiting messages on failure."""
    check = getattr(MagicMock, name)

    @wraps(check)
    def assertion(mock: ReportingMock, /, *args: Any, **kwargs: Any) -> None:
        with add_waiting_messages(mock):
            check(mock, *args, **kwargs)

    return assertion


for _name in (
    "assert_called",
    "assert_called_once",
    "assert_called_with",
    "assert_called_once_with",
    "assert_any_call",
):
    setattr(ReportingMock, _name, _build_assertion(_name))


def attach_waiting_report(recorder: CallRecorder, describe: Callable[[], str]) -> None:
    """Append the text of `describe` to failed assertions on the calls that `recorder` knows.

    FastStream keeps the calls of a handler in a mock, which is replaced once by a `ReportingMock`.
    The function is kept in the mock's `__dict__`, because any attribute of a mock seems to exist.
    """
    if not isinstance(recorder.mock, ReportingMock):
        recorder.mock = ReportingMock()
    recorder.mock.__dict__["what_waits"] = describe


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of a handler on a message."""

    message_id: int
    queue: str
    attempt: int
    """Number of the attempt; 1 for the first."""
    outcome: str
    """Outcome of the delivery: "ack", "nack", "reject", … (see the glossary)."""
    error: BaseException | None
    """The handler's error."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that is not finished; `reason` says so if a handler is working on it."""

    message_id: int
    queue: str
    until: datetime
    """Time when the message is due; or when its lease ends, if it is leased."""
    attempts: int
    """Number of times that a handler has run for the message."""
    reason: str
    """Text that says why the message waits."""

    def __str__(self) -> str:
        """Return the text shown by failed assertions."""
        return f"message {self.message_id} in queue {self.queue!r} {self.reason}"


@dataclass(frozen=True, slots=True)
class Drained:
    """Result of `drain`: attempts and waiting messages."""

    attempts: list[Attempt]
    """Attempts since the last `drain`, in order."""
    waiting: list[Waiting]
    """Waiting messages by due time, priority, id."""

    @property
    def failed(self) -> list[Attempt]:
        """Attempts that raised an error."""
        return [attempt for attempt in self.attempts if attempt.error is not None]


@dataclass(frozen=True, slots=True)
class Published:
    """A message as published."""

    id: int
    queue: str
    body: Any
    """Decoded by its content type; bytes if that is not possible."""
    payload: bytes
    """The stored bytes."""
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


def parse_published(row: Any) -> Published:
    """Parse a row of `TestDatabase.list_published`, whose columns are `COPIED_COLUMNS`.

    The body is decoded as a handler would get it, or stays bytes if that is not possible.
    """
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
