"""What a test is told of: attempts, failures, what waits, what was published.

A mock that fails says what waits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from unittest.mock import MagicMock

from faststream_sqlbroker.adapter.testing import CallRecorder


class NamingMock(MagicMock):
    """A MagicMock; a failed assertion of a call names the messages that wait, and until when."""

    def _get_child_mock(self, /, **options: Any) -> MagicMock:
        return MagicMock(**options)

    def assert_called(self, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_called(*args, **kwargs)

    def assert_called_once(self, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_called_once(*args, **kwargs)

    def assert_called_with(self, /, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_called_with(*args, **kwargs)

    def assert_called_once_with(self, /, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_called_once_with(*args, **kwargs)

    def assert_any_call(self, /, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_any_call(*args, **kwargs)


@contextmanager
def saying(mock: Any) -> Iterator[None]:
    """Add what waits to an AssertionError, once."""
    try:
        yield
    except AssertionError as error:
        describe = mock.__dict__.get("what_waits")
        text = "" if describe is None else describe()
        if not text or text in str(error):
            raise
        raise AssertionError(f"{error}\n{text}") from None


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
