"""Limits of a publish before its messages are written: `max_payload` and `max_depth`.

Messages that are written with an ack are limited by `max_payload` alone: if they waited for
capacity, so would the settlement of a message that has been handled, and a forward could wait for
itself.
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

LOG_INTERVAL = 10.0
"""Seconds between two log lines about dropped messages of one queue."""


class DepthStore(Protocol):
    """A store that counts a queue up to a limit: asynchronous or synchronous."""

    depths: Any


class _QueueLimit:
    """The known depth of a queue in this process."""

    def __init__(self, limit: MaxDepth) -> None:
        self.limit = limit
        self.depth = DepthEstimate(limit.messages)
        self.count_lock = LoopSemaphore(1)
        """Held by the caller that counts or waits for capacity; the others wait in the order of
        their calls."""
        self.dropped_count = 0
        self.logged_at = float("-inf")


class PublishLimits:
    """The publish limits of a broker; a broker without limits has no such object."""

    def __init__(
        self,
        store: DepthStore,
        depths: Mapping[str, MaxDepth],
        max_payload: int | None,
        *,
        log: Log,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Count nothing before the first publish.

        Args:
            store: Counts.
            depths: Limits by queue.
            max_payload: Maximum bytes of a body; None: no limit of the broker.
            log: Gets dropped messages.
            clock: For the time between counts, and for waits.
            recorder: Counts refused messages; None: they are not counted.
        """
        self._store = store
        self._depths = {queue: _QueueLimit(limit) for queue, limit in depths.items()}
        self._max_payload = max_payload
        self._log = log
        # A publish waits in the time of the application: real time if a test's clock stands still.
        self._clock = (clock or Clock()).callers
        self._recorder = recorder

    def check_payload(self, rows: Sequence[NewMessage]) -> None:
        """Refuse bodies of more than `max_payload` bytes, before anything is written.

        Raises:
            MessageTooLargeError: one of `rows` has such a body.
        """
        max_payload = self._max_payload
        if max_payload is None:
            return
        for row in rows:
            if (size := len(row.payload)) > max_payload:
                raise MessageTooLargeError(
                    f"the body for queue {row.queue!r} has {size} bytes, more than the broker's "
                    f"max_payload of {max_payload} bytes: send a smaller body, such as a reference "
                    "to stored data, or raise max_payload"
                )

    async def admit(
        self, rows: Sequence[NewMessage], *, connection: Any, can_wait: bool, droppable: bool = True
    ) -> list[bool] | None:
        """Wait until `rows` may be written; return True or False per row, or None if all may.

        False is a row that is dropped because its queue is full. A queue's depth is estimated: a
        count, which is repeated when too old, plus the publishes of this process since.

        Args:
            rows: The messages to be published.
            connection: The caller's, on which to count; None: the broker's own.
            can_wait: Whether the call may wait for capacity.
            droppable: Whether the caller can do without the message; if not, a queue whose limit
                drops messages raises instead.

        Raises:
            QueueFullError: a queue is full, and its limit raises; nothing was written.
            StoreError: the queue could not be counted.
        """
        full_queues: set[str] = set()
        for queue, count in self._count_rows(rows).items():
            depth = self._depths[queue]
            has_line = depth.count_lock.locked()
            is_known = depth.depth.get_count_delay(self._clock.monotonic()) is None
            if not can_wait if has_line else is_known:
                # Decide by the estimate, without a count. Usually the last count is fresh. Behind a
                # line of callers, a caller that cannot wait must not queue: they may wait for
                # capacity that its own transaction holds back.
                is_free = not depth.depth.is_full
            else:
                is_free = await self._has_capacity(queue, depth, connection)
            if not is_free and depth.limit.when_full == "wait" and can_wait:
                await self._wait_for_capacity(queue, depth, count, connection)
                is_free = True
            self._add_or_refuse(queue, depth, count, is_free=is_free, droppable=droppable)
            if not is_free:
                full_queues.add(queue)
        return [row.queue not in full_queues for row in rows] if full_queues else None

    def admit_sync(self, rows: Sequence[NewMessage], *, connection: Any) -> list[bool] | None:
        """Admit `rows` in the transaction of synchronous code, which never waits.

        Returns as `admit`: False for a row that is dropped, None if all rows may be written.

        Raises:
            QueueFullError: as `admit`.
            StoreError: as `admit`.
        """
        full_queues: set[str] = set()
        for queue, count in self._count_rows(rows).items():
            depth = self._depths[queue]
            now = self._clock.monotonic()
            if depth.depth.can_skip_count(now):
                # Full by the estimate of this process, whose messages may be handled already. A
                # count now would make each publish near a large limit as slow as a count.
                is_free = True
            else:
                self._count_sync(queue, depth, connection)
                is_free = not depth.depth.is_full
            self._add_or_refuse(queue, depth, count, is_free=is_free, droppable=True)
            if not is_free:
                full_queues.add(queue)
        return [row.queue not in full_queues for row in rows] if full_queues else None

    def _count_sync(self, queue: str, depth: _QueueLimit, connection: Any) -> None:
        """Count the due messages of `queue` in the caller's transaction if the count is old.

        Synchronous code has no event loop, so it cannot use the broker's own connection.
        """
        started_at = self._clock.monotonic()
        if depth.depth.get_count_delay(started_at) is None:
            return
        count = self._store.depths.read_sync(connection, queue, depth.limit.messages)
        now = self._clock.monotonic()
        depth.depth.record_count(count, now, now - started_at)

    async def wait_for_capacity(self, queue: str) -> None:
        """Wait until `queue` has capacity, whatever `when_full` says about a publish.

        For callers that publish in their own transaction, where a wait would keep it open: they
        wait here first. A queue without a limit always has capacity.

        Raises:
            QueueFullError: none was free within the limit's timeout.
            StoreError: the queue could not be counted.
        """
        depth = self._depths.get(queue)
        if depth is not None and not await self._has_capacity(queue, depth, None):
            await self._wait_for_capacity(queue, depth, 1, None)

    def _count_rows(self, rows: Sequence[NewMessage]) -> Mapping[str, int]:
        """Return the number of `rows` for each queue with a `max_depth`; leave out other queues."""
        # Two short cuts, because each publish calls this.
        if not self._depths:
            return {}
        if len(rows) == 1:
            return {rows[0].queue: 1} if rows[0].queue in self._depths else {}
        return Counter(row.queue for row in rows if row.queue in self._depths)

    def _add_or_refuse(
        self, queue: str, depth: _QueueLimit, count: int, *, is_free: bool, droppable: bool
    ) -> None:
        """Record the decision on `count` messages for `queue`: written, dropped or refused.

        With `is_free` they are written now, and add to the estimated depth. Else the limit says
        whether they are dropped, unless the caller needs them (`droppable` is False).

        Raises:
            QueueFullError: the messages are refused.
        """
        if is_free:
            depth.depth.add(count)
            return
        if depth.limit.when_full == "drop" and droppable:
            self._record_refused(queue, "dropped", count)
            self._log_dropped(queue, depth, count)
            return
        self._record_refused(queue, "raised", count)
        text = _format_full(queue, depth.limit)
        if depth.limit.when_full == "wait":
            # The limit waits, but this caller could not: the advice says what to do instead.
            text += _NO_WAIT.format(queue=queue)
        raise QueueFullError(queue, text)

    async def _has_capacity(self, queue: str, depth: _QueueLimit, connection: Any) -> bool:
        """Return True if `queue` has capacity, after earlier callers have been served.

        Unlike `_wait_for_capacity`, it does not wait for a full queue to become shorter.
        """
        async with depth.count_lock:
            return await self._check_capacity(queue, depth, connection)

    async def _check_capacity(self, queue: str, depth: _QueueLimit, connection: Any) -> bool:
        """Return True if there is capacity, after a new count if the last count is too old.

        The caller holds `count_lock`, so one count serves all callers that wait behind it. A slow
        count is followed by a pause of some times its duration: counting must stay a small load.
        """
        pause = depth.depth.get_count_delay(self._clock.monotonic())  # None: the count is fresh
        if pause is not None:
            if pause > 0:
                await self._clock.sleep(pause)
            started_at = self._clock.monotonic()
            count = await self._store.depths.count(queue, depth.limit.messages, connection)
            now = self._clock.monotonic()
            depth.depth.record_count(count, now, now - started_at)
        return not depth.depth.is_full

    async def _wait_for_capacity(
        self, queue: str, depth: _QueueLimit, count: int, connection: Any
    ) -> None:
        """Wait until there is capacity, or raise; callers are served in the order of their calls.

        There is capacity if fewer messages are due in `queue` than its limit allows. If there is
        none in time, `count` messages are refused.

        Raises:
            QueueFullError: none was free in time.
        """
        timeout = depth.limit.timeout_seconds
        started_at = self._clock.monotonic()
        try:
            # The time in the line counts, too: many callers may be waiting before this one.
            async with self._clock.timeout(timeout), depth.count_lock:
                while not await self._check_capacity(queue, depth, connection):
                    # All other callers wait behind this one: one count serves all of them.
                    await self._clock.sleep(depth.depth.get_recount_delay(self._clock.monotonic()))
        except TimeoutError as error:
            self._record_refused(queue, "raised", count)
            text = f"{_format_full(queue, depth.limit)}; gave up after {timeout} s of waiting"
            raise QueueFullError(queue, text) from error
        finally:
            if self._recorder is not None:
                self._recorder.observe(FULL_WAIT, (queue,), self._clock.monotonic() - started_at)

    def _record_refused(self, queue: str, action: str, count: int) -> None:
        if self._recorder is not None:
            self._recorder.count(REFUSED, (queue, action), count)

    def _log_dropped(self, queue: str, depth: _QueueLimit, count: int) -> None:
        """Count dropped messages, and log their number every `LOG_INTERVAL` seconds at most.

        A full queue may drop thousands of messages a second: a line for each would flood the log.
        """
        depth.dropped_count += count
        now = self._clock.monotonic()
        if now - depth.logged_at < LOG_INTERVAL:
            return
        text = f"{_format_full(queue, depth.limit)}: dropped {depth.dropped_count} more messages"
        depth.dropped_count = 0
        depth.logged_at = now
        self._log(logging.WARNING, text)


def _format_full(queue: str, limit: MaxDepth) -> str:
    return f"queue {queue!r} has reached its max_depth of {limit.messages} due messages"


_NO_WAIT = (
    "; waiting here would keep your transaction open: roll it back, await "
    "broker.wait_for_room({queue!r}), and repeat it"
)
"""Advice in the error of a publish that cannot wait although the queue's limit says "wait"."""
