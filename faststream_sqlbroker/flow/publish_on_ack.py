"""Messages that a handler publishes together with its ack, in the same transaction.

They wait on the first row of the delivery. Publishers find that row by the message in FastStream's
context, so tasks that the handler starts join too, until the handler has ended.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.exceptions import PublishError
from faststream_sqlbroker.flow.own_context import start_coroutine

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

Task = asyncio.Task[Any]


class CurrentDelivery:
    """The current delivery of a worker, with the store and the task."""

    __slots__ = (
        *("__weakref__", "_must_end", "use_slots", "asked", "cancelling"),
        *("delivery", "started_at", "store", "task", "threads", "worker"),
    )

    def __init__(
        self, store: "Store", must_end: "Callable[[Task | None], bool]" = lambda _task: False
    ) -> None:
        """Handle nothing yet; must be created in the worker's own task.

        `must_end` returns True if the broker, or the end of the event loop, has cancelled a task.
        """
        self.store = store
        self._must_end = must_end
        self.worker = asyncio.current_task()
        self.task = self.worker
        """The task in which the handler runs."""
        # `int()` is 0: without a task there are no cancellations.
        self.cancelling = int if self.task is None else self.task.cancelling
        self.delivery: Sequence[ClaimedMessage] | ClaimedMessage = ()
        self.use_slots: Callable[[Sequence[ClaimedMessage]], bool] | None = None
        """Called before the handler starts. Returns False if a slot of a Throttle was missed; the
        messages are released then."""
        self.started_at = 0.0
        """Time when the handler started (monotonic seconds)."""
        self.threads: list[str] = []
        """Names of the handler's functions that run in threads now."""
        self.asked = False
        """True if an operator's cancel has been sent, and the handler has not ended yet."""

    def must_end(self) -> bool:
        """Return True if the broker, or the end of the event loop, has cancelled the worker."""
        return self._must_end(self.worker)

    @property
    def handled_rows(self) -> list[ClaimedMessage]:
        """Rows that a handler is processing now, without rows whose handler has ended.

        A row gets the reason `ENDED` at the end of its handler, so that nothing can join its ack.
        """
        rows = (self.delivery,) if isinstance(self.delivery, ClaimedMessage) else self.delivery
        return [row for row in rows if row.no_chain_reason is not ENDED]

    def try_start(self) -> bool:
        """Return True if the handler, whose thread begins now, may start.

        A thread may begin late: then the lease may be lost, or the slot missed, which is the time
        that a Throttle policy has given the message to start.
        """
        rows = [self.delivery] if isinstance(self.delivery, ClaimedMessage) else self.delivery
        if any(row.lease_lost for row in rows):
            return False
        return self.use_slots is None or self.use_slots(rows)

    async def run_in_task(self, handler: Coroutine[Any, Any, None]) -> None:
        """Run `handler` in a separate task, and keep that task, which an operator may cancel.

        Then the handler may cancel its task, or leave cancellations behind, without any effect on
        the worker's task.
        """

        async def run() -> None:
            # An eager task starts before `create_task` returns.
            self._set_task(asyncio.current_task())
            if (suspended := start_coroutine(handler)) is not None:
                await suspended

        task = asyncio.create_task(run(), name="sqlbroker-handler")
        self._set_task(task)
        try:
            # A cancellation of the worker is passed on to the task.
            await task
        finally:
            if task.done():
                handler.close()  # if it has not started

    def _set_task(self, task: "Task | None") -> None:
        """Set the task in which the handler runs, which an operator's cancel would cancel."""
        self.task = task
        self.cancelling = int if task is None else task.cancelling

    def cancel(self, row: ClaimedMessage) -> None:
        """Cancel the handler if processing `row`, because an operator has cancelled the message.

        Call it outside of any task, so that the worker's own task is suspended in its handler. A
        second call has no effect before the first has ended the handler.
        """
        delivery = self.delivery
        # Compared by identity, which is cheap and exact: a later delivery of the same message is
        # another object.
        is_current = delivery is row or (
            not isinstance(delivery, ClaimedMessage) and any(item is row for item in delivery)
        )
        if (
            is_current
            and row.no_chain_reason is not ENDED
            and not self.asked
            and self.task is not None
        ):
            self.asked = True
            self.task.cancel()

    def forget_cancels(self) -> None:
        """Forget cancellations of the task, unless the task must end.

        A handler may cancel its own task. Timeouts of anyio 3 and of old async_timeout do so, and
        do not reset the count, so the task would seem cancelled while it runs the next handler.
        """
        if self.task is not None and not self.must_end():
            while self.task.cancelling():
                self.task.uncancel()

    def clear_cancel(self, error: BaseException | None = None) -> bool:
        """Clear an operator's cancel, which must not end the worker, after the handler has ended.

        Otherwise the task would count as cancelled while it handles the next message.

        Returns:
            True if `error` is that cancel and nothing else.
        """
        if not self.asked or self.task is None:
            return False
        self.asked = False
        remaining_cancels = self.task.uncancel()
        return isinstance(error, asyncio.CancelledError) and not remaining_cancels


current_delivery_var: ContextVar[CurrentDelivery | None] = ContextVar(
    "sqlbroker_post", default=None
)
"""Set once for each worker, not for each message; tasks that a handler starts inherit it."""


def join_ack(
    store: "Store",
    delivery: Sequence[ClaimedMessage],
    rows: Sequence[NewMessage],
    *,
    required: bool,
) -> bool:
    """Add `rows` to the delivery that is being handled; return True if that was possible.

    The rows wait in `chained` of the first row. They are written together with an ack or a move,
    and dropped with any other outcome. `delivery` belongs to FastStream's message. It is empty
    where there is none yet (parsers, filters, `on_receive`): there the current delivery of the
    worker counts.

    Raises:
        PublishError: it was not possible although `required`.
    """
    current = current_delivery_var.get()
    first = delivery[0] if delivery else _find_first_row(current)
    if current is not None and current.store is not store:
        refusal = _ELSEWHERE
    elif current is None or first is None:
        refusal = _NONE
    else:
        refusal = first.no_chain_reason
    if first is not None and not refusal:
        # A new list, because all rows share the empty default.
        first.chained = [*first.chained, *rows]
        return True
    if required:
        raise PublishError(refusal)
    return False


def _find_first_row(current: CurrentDelivery | None) -> ClaimedMessage | None:
    """Return the first row of `current` if the caller runs in the task of the handler.

    None otherwise: a task that the handler has started may still run when the worker has the next
    delivery, which its publish must not join.
    """
    if current is None or asyncio.current_task() is not current.task:
        return None
    rows = current.delivery
    return rows if isinstance(rows, ClaimedMessage) else next(iter(rows), None)


def get_due_queues(rows: Iterable[NewMessage]) -> set[str]:
    """Return the queues in which a message is due at once."""
    return {row.queue for row in rows if not row.delay and row.next_attempt_at is None}


def get_filled_queues(settlement: Settlement) -> set[str]:
    """Return the queues in which a message is due at once after `settlement` is written.

    Subscribers of these queues get a hint to poll. A message is due there because the settlement
    moves its own message, or because messages are published with it (`on_ack` of its unit).
    """
    moved_queues = set() if settlement.queue is None or settlement.delay else {settlement.queue}
    return (
        moved_queues
        if settlement.unit is None
        else moved_queues | get_due_queues(settlement.unit.on_ack)
    )


_NONE = (
    "with_ack=True publishes in the transaction of the handler's ack, but no handler runs here: "
    "publish inside a handler of this broker, or omit with_ack"
)
_ELSEWHERE = (
    "with_ack=True publishes in the transaction of the handler's ack, but the handler belongs to "
    "another broker: omit with_ack, or decorate the handler with a publisher"
)
ENDED = (
    "with_ack=True publishes in the transaction of the handler's ack, but the handler has ended: "
    "await the publish inside the handler"
)
ACK_FIRST = (
    "with_ack=True cannot be used with AckPolicy.ACK_FIRST, which acks the message before its "
    "handler starts: omit with_ack, or choose another ack policy"
)
