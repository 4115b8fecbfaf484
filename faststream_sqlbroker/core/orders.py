"""Requests of operators to the fleet; each process reads them with its heartbeats.

A `Repair` is the result of an action on one message.
"""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from faststream_sqlbroker.core.states import MessageState

RepairStatus = Literal["done", "requested", "running", "busy", "ended", "not_found"]

_MESSAGES: dict[RepairStatus, str] = {
    "done": "done",
    "requested": "cancellation requested; if the handler ends first, its outcome counts",
    "busy": "not changed: another transaction has locked it; try again",
}
_IN_ARCHIVE = "it is in the archive as {state}: "
_COMMANDS: dict[MessageState | None, str] = {
    MessageState.PENDING: "it is {state}: `retry {id}` makes it due now",
    MessageState.RETRYABLE: "it is {state}: `retry {id}` makes it due now",
    MessageState.PROCESSING: "a subscriber has leased it: `cancel {id}` requests its end",
    MessageState.COMPLETED: _IN_ARCHIVE + "`replay NAME {id}` publishes it again",
    MessageState.FAILED: _IN_ARCHIVE + "`redrive {id}` returns it to its queue",
    MessageState.DISCARDED: _IN_ARCHIVE
    + "`redrive {id} --state DISCARDED` returns it to its queue",
    None: "no live or archived message has this id",
}


def format_command(message_id: int, state: MessageState | None) -> str:
    """Return the command for a message of this state; None for a missing message."""
    return _COMMANDS[state].format(id=message_id, state=state and state.name)


@dataclass(frozen=True, slots=True)
class Repair:
    """The result of an operator's action on a message; `str()` is for people."""

    message_id: int
    verdict: RepairStatus
    queue: str | None = None
    """Queue of the message; None if the message was not found, or is archived."""
    state: MessageState | None = None
    """Final state of the message, with the verdict `ended`."""

    @property
    def done(self) -> bool:
        """True if the message was changed now."""
        return self.verdict == "done"

    @property
    def is_requested(self) -> bool:
        """True if a subscriber was asked to end the message."""
        return self.verdict == "requested"

    @property
    def is_accepted(self) -> bool:
        """True if the action is done or requested."""
        return self.done or self.is_requested

    def __str__(self) -> str:
        """Return the message and the verdict, with the command to use if nothing was changed."""
        text = _MESSAGES.get(self.verdict)
        if text is None:
            state = MessageState.PROCESSING if self.verdict == "running" else self.state
            text = f"not changed: {format_command(self.message_id, state)}"
        return f"message {self.message_id}: {text}"


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """An operator's request to end a delivery."""

    message_id: int
    lease_token: UUID
    """Lease token of the delivery; the request does not apply to a later one."""
    text: str
    """Name of the operator and the reason; this becomes the message's error."""


@dataclass(frozen=True, slots=True)
class OperatorRequests:
    """The paused queues, requested cancellations and drained subscribers."""

    paused: frozenset[str] = frozenset()
    """Names of the paused queues."""
    cancels: tuple[CancelRequest, ...] = ()
    drained: frozenset[str] | None = frozenset()
    """Names of subscribers of this process that claim nothing; None if not queried."""
