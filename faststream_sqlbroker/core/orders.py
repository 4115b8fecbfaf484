"""What operators have asked of the fleet; each process reads it with its signs of life.

A `Repair` says what came of an action on one message.
"""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from faststream_sqlbroker.core.states import MessageState

Verdict = Literal["done", "requested", "running", "busy", "ended", "not_found"]

_TEXTS: dict[Verdict, str] = {
    "done": "done",
    "requested": "asked its subscriber to cancel it; a handler that ends first wins",
    "busy": "not changed: another transaction has locked it just now; try again",
}
_IN_ARCHIVE = "it has ended as {state}, and is in the archive: "
_COMMANDS: dict[MessageState | None, str] = {
    MessageState.PENDING: "it waits as {state}: retry {id} makes it due now",
    MessageState.RETRYABLE: "it waits as {state}: retry {id} makes it due now",
    MessageState.PROCESSING: "a subscriber has leased it: cancel {id} asks that to end it",
    MessageState.COMPLETED: _IN_ARCHIVE + "replay NAME {id} publishes it again",
    MessageState.FAILED: _IN_ARCHIVE + "redrive {id} brings it back",
    MessageState.DISCARDED: _IN_ARCHIVE + "redrive {id} --state DISCARDED brings it back",
    None: "there is no such message, live or archived",
}


def command_for(message_id: int, state: MessageState | None) -> str:
    """Name the command for a message of this state; None: there is no such message."""
    return _COMMANDS[state].format(id=message_id, state=state and state.name)


@dataclass(frozen=True, slots=True)
class Repair:
    """Whether an operator's action changed a message; `str()` is for people."""

    message_id: int
    verdict: Verdict
    queue: str | None = None
    """Where the message was; None: it was not found, or is archived."""
    state: MessageState | None = None
    """How it ended, with the verdict `ended`."""

    @property
    def done(self) -> bool:
        """Whether the message was changed now."""
        return self.verdict == "done"

    @property
    def requested(self) -> bool:
        """Whether a subscriber is asked to end it."""
        return self.verdict == "requested"

    @property
    def accepted(self) -> bool:
        """Whether it is done, or requested."""
        return self.done or self.requested

    def __str__(self) -> str:
        """The message and the verdict, with the command to use if nothing was changed."""
        text = _TEXTS.get(self.verdict)
        if text is None:
            state = MessageState.PROCESSING if self.verdict == "running" else self.state
            text = f"not changed: {command_for(self.message_id, state)}"
        return f"message {self.message_id}: {text}"


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """An operator wants this delivery to end."""

    message_id: int
    lease_token: UUID
    """Of the delivery: the request means no later one."""
    text: str
    """Who asks, and why: it becomes the message's error."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What is paused, what is to be cancelled, and which subscribers are drained."""

    paused: frozenset[str] = frozenset()
    """Names of queues."""
    cancels: tuple[CancelRequest, ...] = ()
    drained: frozenset[str] | None = frozenset()
    """Names of subscribers of this process that claim nothing; None: not asked."""
