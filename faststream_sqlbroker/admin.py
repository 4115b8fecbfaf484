"""Operations for people who run the broker: pause queues, explain messages, release leases."""

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.rows import UnknownOutcome
from faststream_sqlbroker.core.status import (
    Explanation,
    HeldLock,
    LiveSubscriber,
    PausedQueue,
    Reason,
    Schedule,
)
from faststream_sqlbroker.core.text import clean_text, short
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.store.event_loops import LoopSemaphore
from faststream_sqlbroker.store.live_subscribers import process_name

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

__all__ = (
    "Admin",
    "Explanation",
    "HeldLock",
    "LiveSubscriber",
    "PausedQueue",
    "Reason",
    "Schedule",
    "UnknownOutcome",
)

LONGEST_QUEUE_PAUSE = 100 * 365 * 86_400.0
"""Seconds; the end of the pause then fits the timestamps of every database."""
RELEASED_AT_ONCE = 1_000
"""Messages released in one transaction, so that it stays short."""
LARGEST_ID = 2**63 - 1
"""The largest value of the id column, a signed integer of 64 bits."""
_ID = re.compile(r"-?[0-9]{1,19}", re.ASCII)
"""An id as text; 2**63 has 19 digits."""
LONGEST_TEXT = 1_000
"""Bytes of `reason` and of `by` of a pause; longer text is cut."""


class Admin:
    """The operations of `broker.admin`; they need the database, but no started broker.

    Raises (from every operation):
        TransientStoreError: the database could not be reached or was busy; try again.
        StoreError: the database refused the statement.
    """

    def __init__(
        self,
        store: "Store",
        *,
        channel: str = "",
        heard: Callable[[frozenset[str]], None] = lambda _paused: None,
        turn: LoopSemaphore | None = None,
        pipelines: Iterable[Any] = (),
    ) -> None:
        """Work on the tables of `store`.

        Args:
            store: The store.
            channel: PostgreSQL's NOTIFY channel that tells other processes of a change of pauses.
            heard: Called with the paused queues after each change, for this process.
            turn: Held from the write of a change until `heard` was called, so that of two calls at
                the same time `heard` gets the later state last.
            pipelines: Their names are shown in explanations.
        """
        self._store = store
        self._channel = channel
        self._heard = heard
        self._turn = LoopSemaphore() if turn is None else turn
        self._pipelines = pipelines

    # -- pauses --------------------------------------------------------------------------------

    async def pause(
        self,
        queue: str,
        *,
        reason: str | None = None,
        until: Duration | datetime | None = None,
        by: str | None = None,
    ) -> None:
        """Stop all claims from `queue`, in all processes and across restarts.

        The pause ends with `resume` or at `until`. When this returns, this process claims no more
        from the queue. Other processes stop within their `presence_interval`, on PostgreSQL mostly
        at once. Running handlers continue, and their outcomes are written. Claimed messages that
        wait for a worker are released; no delivery is counted. Publishing continues. Pausing a
        paused queue changes its reason, end and author, but not since when it is paused.

        Args:
            queue: Its full name, with the prefix of its router.
            reason: Shown by `paused` and `explain`; cut to 1 000 bytes.
            until: A duration from now (seconds, a timedelta or text like "1.5h") or an aware
                datetime, by the database's clock; None: until `resume`.
            by: Who pauses, as text; default the host and the process id.

        Raises:
            SetupError: `queue` is not a valid name, `until` is not above 0 or has no time zone, or
                `reason` or `by` is not text.
        """
        info = {"by": _text("by", by) or process_name(), "reason": _text("reason", reason)}
        async with self._turn:
            self._heard(
                await self._store.live_subscribers.pause(
                    _queue(queue), _until(until), info, self._channel
                )
            )

    async def resume(self, queue: str) -> bool:
        """End the pause of `queue`; processes claim again as soon as they would learn of a pause.

        A subscriber that was paused by its own `pause` stays paused.

        Returns:
            Whether the queue was paused.

        Raises:
            SetupError: `queue` is not a valid name.
        """
        async with self._turn:
            was, paused = await self._store.live_subscribers.resume(_queue(queue), self._channel)
            self._heard(paused)
        return was

    async def paused(self) -> list[PausedQueue]:
        """The queues that are paused now, sorted by name."""
        return await self._store.live_subscribers.paused()

    # -- subscribers and messages --------------------------------------------------------------

    async def subscribers(self, queue: str | None = None) -> list[LiveSubscriber]:
        """The live subscribers of all processes, the latest heartbeat first.

        A subscriber that ended without `stop` (SIGKILL, a lost machine) is listed for up to four
        `presence_interval`s more. At most 10 000 are read.

        Args:
            queue: List only subscribers of this queue.
        """
        found = await self._store.live_subscribers.subscribers()
        return [s for s in found if queue is None or queue in s.queues]

    async def release(self, worker: str, *, force: bool = False) -> int:
        """Release the messages that a worker has leased now, instead of when its leases run out.

        Use it for a worker that ended without `stop`; it is known for an hour after that. Its
        messages are due again, and the delivery counts, as after a lease that ran out. Rows locked
        by a handler's transaction (`transactional=True`) stay locked until that transaction ends.

        Args:
            worker: The name of one subscriber of one process, as listed by `subscribers`.
            force: Release also if the worker is alive. Its handlers continue, so their effects
                outside of this database may happen twice. The outcomes that it writes for these
                messages are ignored.

        Returns:
            How many messages were released.

        Raises:
            SetupError: `worker` is not known, or it is alive and `force` is not set.
        """
        if not isinstance(worker, str):
            raise SetupError(f"worker must be the name of a subscriber, got {short(worker)}")
        known = await self._store.live_subscribers.subscriber(worker)
        if known is None:
            msg = (
                f"no subscriber is known as {short(worker)}: broker.admin.subscribers() lists the "
                "live ones with their names; one that ended without stop() is known for an hour"
            )
            raise SetupError(msg)
        subscriber, alive = known
        if alive and not force:
            msg = (
                f"{worker} is alive until {subscriber.lease_expires_at} at least: wait, or stop "
                "its process, or give force=True; with it others handle the messages while "
                "handlers of this worker may still run"
            )
            raise SetupError(msg)
        total = 0
        while count := await self._store.live_subscribers.release(subscriber, RELEASED_AT_ONCE):
            total += count
        return total

    async def explain(self, message_id: int | str) -> Explanation:
        """Explain why a message is not running, or how it ended.

        It reads one snapshot and counts at most 1 000 messages, so it is cheap at any time and from
        any process. The answer holds for the moment of the snapshot. docs/howto/operating.md lists
        the codes.

        Args:
            message_id: As `publish` returns it; or as text, as in a handler's `message.message_id`.

        Raises:
            SetupError: `message_id` is not a whole number of 64 bits.
        """
        text = isinstance(message_id, str) and _ID.fullmatch(message_id)
        number = int(message_id) if text else message_id
        if (
            not isinstance(number, int)
            or isinstance(number, bool)
            or not -LARGEST_ID <= number <= LARGEST_ID
        ):
            msg = (
                "message_id must be a whole number of 64 bits, as returned by publish or found in "
                f"message.message_id, got {short(message_id)}"
            )
            raise SetupError(msg)
        return (await self._store.live_subscribers.explain(number)).at_place(self._pipelines)

    # -- schedules -----------------------------------------------------------------------------

    async def schedules(self, *, limit: int = 1_000) -> list[Schedule]:
        """The schedules of all processes, sorted by name, with their last and next fire times.

        A schedule that no process declares any more stays listed, with a next fire time in the
        past, until `forget_schedule`.

        Args:
            limit: Most schedules to return; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        _check_limit(limit)
        return await self._store.schedules.listed(limit)

    async def forget_schedule(self, name: str) -> bool:
        """Remove the state of a schedule, including fire times that are due.

        A process that still declares it makes a new state within half a minute, which starts with
        the next fire time.

        Returns:
            Whether there was a state.

        Raises:
            SetupError: `name` is not a valid name.
        """
        if (problem := name_problem(name)) is not None:
            raise SetupError(f"{short(name)} cannot be the name of a schedule: {problem}")
        return await self._store.schedules.forget(name)

    # -- unknown outcomes ----------------------------------------------------------------------

    async def unknown(self, queue: str | None = None, *, limit: int = 100) -> list[UnknownOutcome]:
        """Messages whose handler may or may not have run, or may not have finished; oldest first.

        `AckPolicy.ACK_FIRST` removes a message before its handler starts. The message is listed
        here in three cases: its process sent no heartbeat for `release_stuck_timeout` afterwards;
        the answer to the COMMIT of the removal was lost although it was committed; or its handler
        was cancelled at the end of `graceful_timeout`. The message itself is in the archive.

        Args:
            queue: List only messages of this queue.
            limit: Most messages to return; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        _check_limit(limit)
        return await self._store.starts.unknown(queue, limit)

    async def forget_unknown(self, *message_ids: int) -> int:
        """Remove messages from the list of `unknown`, once their outcome was found out.

        Returns:
            How many of them were on the list.
        """
        return await self._store.starts.forget(message_ids)

    async def locks(self, *, limit: int = 100) -> list[HeldLock]:
        """The locks of `broker.lock` that have a holder now, sorted by key.

        Args:
            limit: Most locks to return; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        _check_limit(limit)
        return list(await self._store.locks.held(limit))

    async def release_lock(self, key: str) -> bool:
        """Take the lock `key` from its holder; another process can lock it from now on.

        The holder is not stopped. It learns of it at its next renewal, at the latest after a third
        of its lease. Its fence is lower than every later one.

        Returns:
            Whether the lock had a holder; the holder's lease may have run out already.

        Raises:
            ValueError: `key` is not a valid key.
        """
        if (problem := name_problem(key)) is not None:
            msg = f"{short(key)} cannot be the key of a lock: {problem}"
            raise ValueError(msg)
        return await self._store.locks.force(key)


def _check_limit(limit: int) -> None:
    if limit < 1:
        msg = f"limit must be 1 or more, got {limit!r}"
        raise ValueError(msg)


def _queue(value: str) -> str:
    if problem := name_problem(value):
        msg = f"{short(value)} cannot be the name of a queue: {problem}"
        raise SetupError(msg)
    return value


def _until(value: Duration | datetime | None) -> datetime | float | None:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise SetupError(
                f"until needs a time zone, got the naive datetime {value!r}: "
                "use datetime.now(timezone.utc)"
            )
        return value
    if value is None:
        return None
    seconds = parse_duration(value, name="until")
    if not 0 < seconds <= LONGEST_QUEUE_PAUSE:
        raise SetupError(
            "until must be a duration above 0 and of at most 100 years, or a datetime, "
            f"got {short(value)}"
        )
    return seconds


def _text(name: str, value: str | None) -> str | None:
    if value is not None and not isinstance(value, str):
        msg = f"{name} must be text, got {short(value)}"
        raise SetupError(msg)
    return None if value is None else clean_text(value, limit=LONGEST_TEXT)
