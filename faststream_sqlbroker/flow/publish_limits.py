"""What a publish is held to before its messages are written: `max_payload` and `max_depth`.

What is written with an ack is held to `max_payload` alone: if it waited for room, so would the
settlement of a message that has been handled, and a forward could wait for itself.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.depth import DepthEstimate, MaxDepth
from faststream_sqlbroker.core.metrics import FULL_WAIT, REFUSED, Recorder
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.exceptions import MessageTooLargeError, QueueFullError
from faststream_sqlbroker.flow.loop import Log

TELL_EVERY = 10.0
"""Seconds between two lines of the log about dropped messages of one queue."""


class Counting(Protocol):
    """What counts a queue up to a limit: an asynchronous or a synchronous store."""

    depths: Any


class _Gate:
    """What one process knows of one queue."""

    def __init__(self, limit: MaxDepth) -> None:
        self.limit = limit
        self.depth = DepthEstimate(limit.messages)
        self.turn = LoopSemaphore(1)
        """Who counts, or waits for room: the others wait behind it, in the order of their calls."""
        self.dropped = 0
        self.told_at = float("-inf")


class PublishLimits:
    """The limits of one broker; a broker without limits has none of these."""

    def __init__(
        self,
        store: Counting,
        depths: Mapping[str, MaxDepth],
        max_payload: int | None,
        *,
        log: Log,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Nothing is counted before the first publish.

        Args:
            store: Counts.
            depths: Limits by queue.
            max_payload: Most bytes of a body; None: no limit of the broker.
            log: Is told of dropped messages.
            clock: For the time between counts, and for waits.
            recorder: Counts what is refused; None: it is not counted.
        """
        self._store = store
        self._gates = {queue: _Gate(limit) for queue, limit in depths.items()}
        self._max_payload = max_payload
        self._log = log
        self._clock = (clock or Clock()).callers
        self._recorder = recorder

    def check_payload(self, rows: Sequence[NewMessage]) -> None:
        """Refuse bodies of more than `max_payload` bytes.

        Raises:
            MessageTooLargeError: one of `rows` has such a body.
        """
        most = self._max_payload
        if most is None:
            return
        for row in rows:
            if (size := len(row.payload)) > most:
                raise MessageTooLargeError(
                    f"a body of {size} bytes for the queue {row.queue!r} is larger than "
                    f"max_payload of the broker, {most} bytes: send less, for example where the "
                    "body is stored, or raise max_payload"
                )

    async def admit(
        self, rows: Sequence[NewMessage], *, connection: Any, waits: bool, droppable: bool = True
    ) -> list[bool] | None:
        """Wait until `rows` may be written; which of them, or None for all.

        Args:
            rows: What is to be published.
            connection: The caller's, on which to count; None: the broker's own.
            waits: Whether a wait may be waited for.
            droppable: Whether the caller can do without the message.

        Raises:
            QueueFullError: a queue is full, and its limit says so; nothing was written.
            StoreError: the queue could not be counted.
        """
        full: set[str] = set()
        for queue, count in self._counts(rows).items():
            gate = self._gates[queue]
            # Nearly always: a fresh count that leaves room, and no caller before this one. Those
            # before it may wait for room that the caller's own transaction keeps from coming.
            queues_up = gate.turn.locked()
            is_known = gate.depth.count_in(self._clock.monotonic()) is None
            if not waits if queues_up else is_known:
                is_free = not gate.depth.is_full
            else:
                is_free = await self._is_free(queue, gate, connection)
            if not is_free and gate.limit.when_full == "wait" and waits:
                await self._wait(queue, gate, connection)
                is_free = True
            self._enter(queue, gate, count, is_free=is_free, droppable=droppable)
            if not is_free:
                full.add(queue)
        return [row.queue not in full for row in rows] if full else None

    def admit_sync(self, rows: Sequence[NewMessage], *, connection: Any) -> list[bool] | None:
        """`admit` in the transaction of synchronous code, which never waits.

        Raises:
            QueueFullError: as `admit`.
            StoreError: as `admit`.
        """
        full: set[str] = set()
        for queue, count in self._counts(rows).items():
            gate = self._gates[queue]
            began = self._clock.monotonic()
            if gate.depth.rests(began):
                # Full by what this process has added, which may be handled already. To count now
                # would make each publish near a large limit as slow as a count.
                is_free = True
            else:
                self._count_sync(queue, gate, connection)
                is_free = not gate.depth.is_full
            self._enter(queue, gate, count, is_free=is_free, droppable=True)
            if not is_free:
                full.add(queue)
        return [row.queue not in full for row in rows] if full else None

    def _count_sync(self, queue: str, gate: _Gate, connection: Any) -> None:
        began = self._clock.monotonic()
        if gate.depth.count_in(began) is None:
            return
        found = self._store.depths.read_sync(connection, queue, gate.limit.messages)
        now = self._clock.monotonic()
        gate.depth.counted(found, now, now - began)

    async def wait_for_room(self, queue: str) -> None:
        """Wait until `queue` has room, whatever its limit does with a publish; a queue without a
        limit always has.

        Raises:
            QueueFullError: none came within the limit's timeout.
            StoreError: the queue could not be counted.
        """
        gate = self._gates.get(queue)
        if gate is not None and not await self._is_free(queue, gate, None):
            await self._wait(queue, gate, None)

    def _counts(self, rows: Sequence[NewMessage]) -> Mapping[str, int]:
        """How many of `rows` go to each queue with a limit."""
        if not self._gates:
            return {}
        if len(rows) == 1:
            return {rows[0].queue: 1} if rows[0].queue in self._gates else {}
        return Counter(row.queue for row in rows if row.queue in self._gates)

    def _enter(
        self, queue: str, gate: _Gate, count: int, *, is_free: bool, droppable: bool
    ) -> None:
        """Note `count` messages, which are written or dropped now.

        Raises:
            QueueFullError: they are neither.
        """
        if is_free:
            gate.depth.add(count)
            return
        if gate.limit.when_full == "drop" and droppable:
            self._note_refused(queue, "dropped", count)
            self._tell_dropped(queue, gate, count)
            return
        self._note_refused(queue, "raised", count)
        text = _full(queue, gate.limit)
        if gate.limit.when_full == "wait":
            text += _NO_WAIT.format(queue=queue)
        raise QueueFullError(queue, text)

    async def _is_free(self, queue: str, gate: _Gate, connection: Any) -> bool:
        async with gate.turn:
            return await self._counted_free(queue, gate, connection)

    async def _counted_free(self, queue: str, gate: _Gate, connection: Any) -> bool:
        """Whether there is room, after a count if that has to tell; in this caller's turn."""
        pause = gate.depth.count_in(self._clock.monotonic())
        if pause is not None:
            if pause > 0:
                await self._clock.sleep(pause)
            began = self._clock.monotonic()
            found = await self._store.depths.read(queue, gate.limit.messages, connection)
            now = self._clock.monotonic()
            gate.depth.counted(found, now, now - began)
        return not gate.depth.is_full

    async def _wait(self, queue: str, gate: _Gate, connection: Any) -> None:
        """Return when there is room.

        Raises:
            QueueFullError: none came in time.
        """
        timeout = gate.limit.timeout_seconds
        began = self._clock.monotonic()
        try:
            # The time in the line counts, too: a caller may wait behind many others.
            async with self._clock.timeout(timeout), gate.turn:
                while not await self._counted_free(queue, gate, connection):
                    # All that wait here wait behind this one: one count for all of them.
                    await self._clock.sleep(gate.depth.next_count(self._clock.monotonic()))
        except TimeoutError as error:
            self._note_refused(queue, "raised", 1)
            text = f"{_full(queue, gate.limit)}, and no room came within {timeout} s"
            raise QueueFullError(queue, text) from error
        finally:
            if self._recorder is not None:
                self._recorder.observe(FULL_WAIT, (queue,), self._clock.monotonic() - began)

    def _note_refused(self, queue: str, how: str, count: int) -> None:
        if self._recorder is not None:
            self._recorder.count(REFUSED, (queue, how), count)

    def _tell_dropped(self, queue: str, gate: _Gate, count: int) -> None:
        gate.dropped += count
        now = self._clock.monotonic()
        if now - gate.told_at < TELL_EVERY:
            return
        text = f"{_full(queue, gate.limit)}: {gate.dropped} more messages were dropped until now"
        gate.dropped = 0
        gate.told_at = now
        self._log(logging.WARNING, text)


def _full(queue: str, limit: MaxDepth) -> str:
    return f"the queue {queue!r} has {limit.messages} due messages, its max_depth"


_NO_WAIT = (
    "; a wait would keep your transaction open: await broker.wait_for_room({queue!r}) before it "
    "begins, and repeat it"
)
