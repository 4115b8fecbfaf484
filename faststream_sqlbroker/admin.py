"""What an operator asks of the broker, and tells it."""

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
"""Seconds: every database has the moment it ends."""
RELEASED_AT_ONCE = 1_000
"""Messages that are given back in one transaction."""
LARGEST_ID = 2**63 - 1
"""The largest BIGINT: what is beyond it would be refused by the driver, with a worse error."""
_ID = re.compile(r"-?[0-9]{1,19}", re.ASCII)
LONGEST_TEXT = 1_000
"""Bytes of a reason, and of the name of who pauses."""


class Admin:
    """`broker.admin`: needs the database, but no running broker.

    Raises (from every operation):
        TransientStoreError: the database could not be reached or was busy.
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

        Pauses are told to other processes on `channel` (PostgreSQL), to this one by `heard`, in the
        order in which `turn` lets them be written; `pipelines` are named in explanations.
        """
        self._store, self._channel, self._heard, self._pipelines = store, channel, heard, pipelines
        self._turn = LoopSemaphore() if turn is None else turn

    # -- pauses -------------------------------------------------------------------------------------

    async def pause(
        self,
        queue: str,
        *,
        reason: str | None = None,
        until: Duration | datetime | None = None,
        by: str | None = None,
    ) -> None:
        """Let nobody claim from `queue`: for the whole fleet, across restarts, until `resume` or
        `until`.

        When it returns, this process claims no more; other processes stop within their
        `presence_interval`, on PostgreSQL mostly at once. Running handlers go on and their outcomes
        are written; messages that wait for a worker are given back, uncharged. Publishing goes on.
        A queue that is paused already stays paused since then, with the new words and end.

        Args:
            queue: Its full name, with the prefix of its router.
            reason: Shown to who asks; at most 1 000 bytes are kept.
            until: A length of time from now, or an aware datetime, by the database's clock; None:
                until `resume`.
            by: Who pauses; default host and process id.

        Raises:
            SetupError: an impossible name of a queue, a length that is not positive, a datetime
                without its zone, or a reason or name that is no text.
        """
        info = {"by": _text("by", by) or process_name(), "reason": _text("reason", reason)}
        async with self._turn:
            self._heard(
                await self._store.live_subscribers.pause(
                    _queue(queue), _until(until), info, self._channel
                )
            )

    async def resume(self, queue: str) -> bool:
        """Let `queue` be claimed from again, as soon as `pause` is heard of. A subscriber paused by
        itself stays so.

        Returns:
            Whether it was paused.

        Raises:
            SetupError: an impossible name of a queue.
        """
        async with self._turn:
            was, paused = await self._store.live_subscribers.resume(_queue(queue), self._channel)
            self._heard(paused)
        return was

    async def paused(self) -> list[PausedQueue]:
        """The queues that are paused now, by name."""
        return await self._store.live_subscribers.paused()

    # -- who and why --------------------------------------------------------------------------------

    async def subscribers(self, queue: str | None = None) -> list[LiveSubscriber]:
        """The subscribers of all processes that count as alive, those heard of last first.

        One that ended without a word (SIGKILL, a machine lost) is listed for up to four
        `presence_interval`s more. At most 10 000 are read.

        Args:
            queue: Only those of this one.
        """
        found = await self._store.live_subscribers.subscribers()
        return [s for s in found if queue is None or queue in s.queues]

    async def release(self, worker: str, *, force: bool = False) -> int:
        """Give back at once what a worker has leased, instead of when its leases run out.

        For one that is gone without a word: it is remembered for an hour. Its messages are due
        again and count as delivered once more, as after a lease that has run out. What a handler's
        transaction has locked (`transactional=True`) stays until that transaction ends.

        Args:
            worker: The name of one subscriber of one process, as `subscribers` has it.
            force: Also if it lives. Its handlers go on, and what they do outside of this database
                happens twice: nothing that it writes of these messages counts any more.

        Returns:
            How many messages were given back.

        Raises:
            SetupError: `worker` is not known, or it lives and `force` is not set.
        """
        if not isinstance(worker, str):
            raise SetupError(f"worker must be the name of a subscriber, got {short(worker)}")
        known = await self._store.live_subscribers.subscriber(worker)
        if known is None:
            msg = (
                f"no subscriber is known as {short(worker)}: broker.admin.subscribers() lists those that live, with "
                "their names; one that ended without a word is remembered for an hour"
            )
            raise SetupError(msg)
        subscriber, lives = known
        if lives and not force:
            msg = (
                f"{worker} lives, as far as is known until {subscriber.lease_expires_at}: wait, or stop its process, or "
                "give force=True, after which others handle its messages while its own handlers may still run"
            )
            raise SetupError(msg)
        total = 0
        while count := await self._store.live_subscribers.release(subscriber, RELEASED_AT_ONCE):
            total += count
        return total

    async def explain(self, message_id: int | str) -> Explanation:
        """Say why a message is not running, or what became of it.

        Reads one snapshot, and never counts more than 1 000 messages, so it may be asked at any
        time, by any process. What it says holds for that moment. docs/howto/operating.md lists the
        codes.

        Args:
            message_id: As `publish` returns it, or the text of it, which handlers have as
                `message.message_id`.

        Raises:
            SetupError: `message_id` is no whole number of 64 bits.
        """
        text = isinstance(message_id, str) and _ID.fullmatch(message_id)
        number = int(message_id) if text else message_id
        if (
            not isinstance(number, int)
            or isinstance(number, bool)
            or not -LARGEST_ID <= number <= LARGEST_ID
        ):
            msg = (
                "message_id must be a whole number of 64 bits, as publish returns it or as message.message_id has "
                f"it, got {short(message_id)}"
            )
            raise SetupError(msg)
        return (await self._store.live_subscribers.explain(number)).at_place(self._pipelines)

    # -- schedules ----------------------------------------------------------------------------------

    async def schedules(self, *, limit: int = 1_000) -> list[Schedule]:
        """The schedules of all processes, by name, with their last and next fire time.

        One that no process declares any more stays listed, with a next fire time in the past, until
        `forget_schedule`.

        Args:
            limit: Most schedules; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        _check_limit(limit)
        return await self._store.schedules.listed(limit)

    async def forget_schedule(self, name: str) -> bool:
        """Remove what is remembered of a schedule, fire times that are due included.

        A process that still declares it begins anew, within half a minute: with the first fire time
        after that.

        Returns:
            Whether it was there.

        Raises:
            SetupError: `name` cannot be the name of a schedule.
        """
        if (problem := name_problem(name)) is not None:
            raise SetupError(f"{short(name)} cannot be the name of a schedule: {problem}")
        return await self._store.schedules.forget(name)

    # -- unknown outcomes ---------------------------------------------------------------------------

    async def unknown(self, queue: str | None = None, *, limit: int = 100) -> list[UnknownOutcome]:
        """Messages of which nobody knows whether their handler has run, or how far it came; the
        oldest first.

        `AckPolicy.ACK_FIRST` removes a message before its handler starts. It is listed here when
        its process has not been heard of for `release_stuck_timeout` since, when the answer to the
        removal's COMMIT was lost (and it was committed), or when its handler was cancelled at the
        end of `graceful_timeout`. The message itself is in the archive.

        Args:
            queue: Only of this one.
            limit: Most messages; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        _check_limit(limit)
        return await self._store.starts.unknown(queue, limit)

    async def forget_unknown(self, *message_ids: int) -> int:
        """Take messages off the list of `unknown`, when it is known what became of them.

        Returns:
            How many of them were on the list.
        """
        return await self._store.starts.forget(message_ids)

    async def locks(self, *, limit: int = 100) -> list[HeldLock]:
        """The locks of `broker.lock` that somebody has now, by key.

        Args:
            limit: Most locks; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        _check_limit(limit)
        return list(await self._store.locks.held(limit))

    async def release_lock(self, key: str) -> bool:
        """Take the lock `key` from whoever has it; somebody else may lock it at once.

        The holder is not stopped: it finds out at its next renewal, after a third of its lease at
        the latest. Its fence is lower than every fence given out from now on.

        Returns:
            Whether somebody had it, with a lease that may have run out.

        Raises:
            ValueError: `key` cannot be the key of a lock.
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
            msg = f"until needs a zone, got the naive datetime {value!r}: use datetime.now(timezone.utc)"
            raise SetupError(msg)
        return value
    if value is None:
        return None
    seconds = parse_duration(value, name="until")
    if not 0 < seconds <= LONGEST_QUEUE_PAUSE:
        msg = f"until must be a length of more than 0 and at most 100 years, or a datetime, got {short(value)}"
        raise SetupError(msg)
    return seconds


def _text(name: str, value: str | None) -> str | None:
    if value is not None and not isinstance(value, str):
        msg = f"{name} must be text, got {short(value)}"
        raise SetupError(msg)
    return None if value is None else clean_text(value, limit=LONGEST_TEXT)
