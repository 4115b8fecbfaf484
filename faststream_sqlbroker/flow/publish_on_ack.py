"""What a handler publishes together with its ack: written in the transaction that settles its
message.

It waits on the first row of the delivery. Publishers find that row by the message that FastStream's
context holds, so tasks that the handler starts join too, until the handler has ended.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.exceptions import PublishError
from faststream_sqlbroker.flow.own_context import begin

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

Task = asyncio.Task[Any]


class CurrentDelivery:
    """Where one worker works: its store, its task, and the delivery it handles now."""

    __slots__ = (
        *("__weakref__", "_must_end", "asked", "began", "cancelling", "delivery", "store"),
        *("take_slots", "task", "threads", "worker"),
    )

    def __init__(
        self, store: "Store", must_end: "Callable[[Task | None], bool]" = lambda _task: False
    ) -> None:
        """Nothing is handled yet; made in the worker's own task.

        `must_end` tells whether the broker, or the end of the event loop, has cancelled a task.
        """
        self.store = store
        self._must_end = must_end
        self.worker = asyncio.current_task()
        self.task = self.worker
        """In which the handler runs."""
        self.cancelling = int if self.task is None else self.task.cancelling
        self.delivery: Sequence[ClaimedMessage] | ClaimedMessage = ()
        self.take_slots: Callable[[Sequence[ClaimedMessage]], bool] | None = None
        """Whether the handler of messages may start now, by the slots of a Throttle; else they go
        back."""
        self.began = 0.0
        """When its handler began (monotonic seconds)."""
        self.threads: list[str] = []
        """The functions of its handler that run in threads now, by name."""
        self.asked = False
        """Whether its handler was cancelled for an operator, and has not ended yet."""

    def must_end(self) -> bool:
        """Whether the broker, or the end of the event loop, has cancelled the worker."""
        return self._must_end(self.worker)

    @property
    def handled(self) -> list[ClaimedMessage]:
        """What a handler runs on now."""
        rows = (self.delivery,) if isinstance(self.delivery, ClaimedMessage) else self.delivery
        return [row for row in rows if row.no_chain is not ENDED]

    def may_start(self) -> bool:
        """Whether the handler, whose thread begins now, may start."""
        rows = [self.delivery] if isinstance(self.delivery, ClaimedMessage) else self.delivery
        if any(row.lease_lost for row in rows):
            return False
        return self.take_slots is None or self.take_slots(rows)

    async def run_in_task(self, handler: Coroutine[Any, Any, None]) -> None:
        """Run `handler` in a task of its own."""

        async def run() -> None:
            # An eager task begins before its creator knows it.
            self._enter(asyncio.current_task())
            if (suspended := begin(handler)) is not None:
                await suspended

        task = asyncio.create_task(run(), name="sqlbroker-handler")
        self._enter(task)
        try:
            # A cancellation of the worker goes on to the task.
            await task
        finally:
            if task.done():
                handler.close()  # one that has not begun

    def _enter(self, task: "Task | None") -> None:
        self.task = task
        self.cancelling = int if task is None else task.cancelling

    def cancel(self, row: ClaimedMessage) -> None:
        """Cancel the handler if it runs on `row`; called by no task, so that the worker's own is
        suspended: in its handler.
        """
        delivery = self.delivery
        ours = delivery is row or (
            not isinstance(delivery, ClaimedMessage) and any(each is row for each in delivery)
        )
        if ours and row.no_chain is not ENDED and not self.asked and self.task is not None:
            self.asked = True
            self.task.cancel()

    def forget_cancels(self) -> None:
        """Forget that the task was cancelled, unless that must end it.

        A handler may cancel its own task. Timeouts of anyio 3 and of old async_timeout do so, and
        leave the count as it was then.
        """
        if self.task is not None and not self.must_end():
            while self.task.cancelling():
                self.task.uncancel()

    def end_cancel(self, error: BaseException | None = None) -> bool:
        """The handler has ended: the cancel must not end the worker, too. Whether `error` is that
        cancel and nothing else.
        """
        if not self.asked or self.task is None:
            return False
        self.asked = False
        others = self.task.uncancel()
        return isinstance(error, asyncio.CancelledError) and not others


current_delivery: ContextVar[CurrentDelivery | None] = ContextVar("sqlbroker_post", default=None)
"""Set once for each worker, not for each message; the tasks that a handler starts inherit it."""


def join(
    store: "Store", told: Sequence[ClaimedMessage], rows: Sequence[NewMessage], *, required: bool
) -> bool:
    """Add `rows` to the delivery that is being handled; whether that was possible.

    `told` is the delivery of FastStream's message, empty where it has none yet (parsers, filters,
    `on_receive`): there the worker's own task knows.

    Raises:
        PublishError: it was not, and `required`.
    """
    here = current_delivery.get()
    first = told[0] if told else _own_first(here)
    if here is not None and here.store is not store:
        refusal = _ELSEWHERE
    elif here is None or first is None:
        refusal = _NONE
    else:
        refusal = first.no_chain
    if first is not None and not refusal:
        # A new list, as all rows share the empty default.
        first.chained = [*first.chained, *rows]
        return True
    if required:
        raise PublishError(refusal)
    return False


def _own_first(here: CurrentDelivery | None) -> ClaimedMessage | None:
    """The first row of the delivery `here`, if the worker's own task asks."""
    # A task that the handler started may still run when the worker has the next delivery: its
    # publish must not join that one.
    if here is None or asyncio.current_task() is not here.task:
        return None
    rows = here.delivery
    return rows if isinstance(rows, ClaimedMessage) else next(iter(rows), None)


def due_queues(rows: Iterable[NewMessage]) -> set[str]:
    """Queues in which something is due at once."""
    return {row.queue for row in rows if not row.delay and row.next_attempt_at is None}


def filled_queues(settlement: Settlement) -> set[str]:
    """Queues in which something is due at once since `settlement` is written."""
    moved = set() if settlement.queue is None or settlement.delay else {settlement.queue}
    return moved if settlement.unit is None else moved | due_queues(settlement.unit.on_ack)


_NONE = (
    "with_ack=True joins the ack of the message that is being handled, and none is: publish "
    "inside a handler of this broker, or leave it out"
)
_ELSEWHERE = (
    "with_ack=True joins the ack of the message that is being handled, which is another broker's: "
    "leave it out, or stack a publisher"
)
ENDED = (
    "with_ack=True joins the ack of the message that is being handled, but its handler has ended: "
    "await the publish inside the handler"
)
ACK_FIRST = (
    "with_ack=True cannot be used with AckPolicy.ACK_FIRST, under which the message is acked "
    "before its handler starts: leave it out, or choose another policy"
)
