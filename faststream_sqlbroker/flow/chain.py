"""What a handler publishes together with its ack: written in the transaction that settles its message.

It waits on the first row of the delivery. Publishers find that row by the message that FastStream's context holds, so
tasks that the handler starts join too, until the handler has ended.
"""

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.exceptions import PublishError

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

working_for: ContextVar["Store | None"] = ContextVar("sqlbroker_working_for", default=None)
"""The store whose messages are handled here; set once for each worker, not for each message."""


def join(
    store: "Store", delivery: Sequence[ClaimedMessage], rows: Sequence[NewMessage], *, required: bool
) -> bool:
    """Add `rows` to `delivery`, which is being handled (empty if none is); whether that was possible.

    Raises:
        PublishError: it was not, and `required`.
    """
    owner = working_for.get()
    if owner is not None and owner is not store:
        refusal = _ELSEWHERE
    elif owner is None or not delivery:
        refusal = _NONE
    else:
        refusal = delivery[0].no_chain
    if not refusal:
        delivery[0].chained = [*delivery[0].chained, *rows]
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
_ELSEWHERE = (
    "with_ack=True joins the ack of the message that is being handled, which is another broker's: "
    "leave it out, or stack a publisher"
)
ENDED = (
    "with_ack=True joins the ack of the message that is being handled, but its handler has ended: await "
    "the publish inside the handler"
)
ACK_FIRST = (
    "with_ack=True cannot be used with AckPolicy.ACK_FIRST, under which the message is acked before its "
    "handler starts: leave it out, or choose another policy"
)
