"""What a handler publishes together with its ack: written in the transaction that settles its message.

The worker opens a chain for each delivery; publishers find it by a context variable, so tasks that the
handler starts join it too, until the handler has ended.
"""

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.exceptions import PublishError

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store


class Chain:
    """The messages that follow one delivery, if its outcome is ack or move."""

    __slots__ = ("_ack_first", "_store", "ended", "rows")

    def __init__(self, store: "Store", *, ack_first: bool = False) -> None:
        """With `ack_first` the message is settled already, so nothing can join."""
        self._store, self._ack_first = store, ack_first
        self.ended = False
        """Whether the handler has ended."""
        self.rows: Sequence[NewMessage] = ()

    def refusal(self, store: "Store") -> str:
        """Why what is published to `store` cannot join; empty if it can."""
        if store is not self._store:
            return _ELSEWHERE
        if self._ack_first:
            return _ACK_FIRST
        return _ENDED if self.ended else ""


current: ContextVar[Chain | None] = ContextVar("sqlbroker_chain", default=None)


def join(store: "Store", rows: Sequence[NewMessage], *, required: bool) -> bool:
    """Add `rows` to the delivery that is being handled; whether that was possible.

    Raises:
        PublishError: it was not, and `required`.
    """
    chain = current.get()
    refusal = _NONE if chain is None else chain.refusal(store)
    if chain is not None and not refusal:
        chain.rows = [*chain.rows, *rows]
        return True
    if required:
        raise PublishError(refusal)
    return False


def due_queues(rows: Iterable[NewMessage]) -> set[str]:
    """Queues in which something is due at once."""
    return {row.queue for row in rows if not row.delay and row.next_attempt_at is None}


_NONE = (
    "with_ack=True joins the ack of the message that is being handled, and none is: publish inside a "
    "handler of this broker, or leave it out"
)
_ENDED = (
    "with_ack=True joins the ack of the message that is being handled, but its handler has ended: await "
    "the publish inside the handler"
)
_ELSEWHERE = (
    "with_ack=True joins the ack of the message that is being handled, which is another broker's: "
    "leave it out, or stack a publisher"
)
_ACK_FIRST = (
    "with_ack=True cannot be used with AckPolicy.ACK_FIRST, under which the message is acked before its "
    "handler starts: leave it out, or choose another policy"
)
