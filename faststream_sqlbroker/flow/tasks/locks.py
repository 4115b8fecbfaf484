"""Locks by key: acquired, waited for, renewed, and released at the end of their block."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.times import Duration, parse_lease
from faststream_sqlbroker.database.messages.handler import refuse_in_handler
from faststream_sqlbroker.exceptions import (
    LockLostError,
    LockNotAcquiredError,
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.loop import Log, backoff
from faststream_sqlbroker.flow.shielded import ShieldedCalls, try_undo, wait_through_cancel

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


# One lock that this process holds: renewed, extended, released.

UNKNOWN_REPEATS = 3
"""Tries to find out the result of a COMMIT without an answer."""
KEEPER_LIMIT = 1.0
"""Seconds for a renewal in progress at the end of the block."""


class Lock:
    """A lock that this process has acquired; created by `broker.lock`.

    It is renewed after a third of its lease for as long as its block runs.
    """

    def __init__(
        self,
        store: "Store",
        log: Log,
        key: str,
        fence: int,
        token: UUID,
        lease: float,
        since: float,
        clock: Clock,
    ) -> None:
        """Create the lock after the database has given it, with the number `fence`.

        `token` proves the ownership in each statement, and `lease` is in seconds. `since` is the
        monotonic time before the request: the lease must not seem to end later than it does.
        """
        self._store = store
        self._log = log
        self._token = token
        self._clock = clock
        self._key = key
        self._fence = fence
        self._lease = lease
        self._since = since
        self._held_until = since + lease
        self._is_lost = self._is_ended = False
        self._changed = asyncio.Event()
        self._extend_lock = asyncio.Lock()

    @property
    def key(self) -> str:
        """Key of the lock."""
        return self._key

    @property
    def fence(self) -> int:
        """A number that each new holder of this key, and each release by an operator, raises.

        A later holder's number is greater, so a resource outside of this database can refuse a
        fence that is lower than one it has seen.
        """
        return self._fence

    @property
    def is_held(self) -> bool:
        """True while the lock is held; False if the lease is known to be gone, or has expired.

        False after the block, too. The expiry is by this process's clock, from before the request,
        so the lock may still be held: `extend` asks the database.
        """
        return not (self._is_lost or self._is_ended) and self._clock.monotonic() < self._held_until

    def check(self) -> None:
        """Raise an error unless `is_held`, without a query.

        For the code of the block, before a step that must not run without the lock.

        Raises:
            LockLostError: the lock is not held.
        """
        if not self.is_held:
            raise self._create_lost_error()

    async def extend(self, lease: Duration | None = None) -> None:
        """Extend the lease from now on, by the database's clock.

        Args:
            lease: Its new length, also for the renewals that follow; None keeps the old one.

        Raises:
            LockLostError: another holder has, or had, the lock since, it was taken away, or the
                block has ended.
            SetupError: `lease` is not a duration longer than 0.
            StoreError: the database refused or could not be reached; the lease is as it was, or
                after an `UnknownOutcomeError` as it was or extended.
        """
        seconds = self._lease if lease is None else parse_lease(lease)
        async with self._extend_lock:
            await self._extend(seconds)
        self._changed.set()  # the task that renews the lease must compute its next time again

    async def _extend(self, lease: float) -> None:
        """Extend the lease to `lease` seconds; the caller holds `_extend_lock`.

        An error that says that nothing was written restores the old lease. After an unknown result
        (a COMMIT without an answer) the lease that ends first counts: the lock must not seem to be
        held for longer than it is.
        """
        if self._is_ended or self._is_lost:
            raise self._create_lost_error()
        started_at = self._clock.monotonic()
        previous_lease = self._lease
        previous_until = self._held_until
        # Set before the statement: the lease may become shorter, and the answer may be lost.
        self._lease = lease
        self._held_until = min(previous_until, started_at + lease)
        try:
            is_extended = await self._store.locks.extend(self._key, self._token, lease)
        except UnknownOutcomeError:
            raise
        except StoreError:
            self._lease = previous_lease
            self._held_until = previous_until
            raise
        if not is_extended:
            self._is_lost = True
            raise self._create_lost_error()
        self._since = started_at
        self._held_until = started_at + lease

    async def keep(self) -> None:
        """Renew the lease after each third until `end`, or until the lock is lost.

        Runs in a task during the lock's block. After a failure the pauses are shorter, at most a
        sixth of the lease, so that several tries fit in before its end.
        """
        failures = 0
        while not (self._is_ended or self._is_lost):
            wait = self._since + self._lease / 3 - self._clock.monotonic()
            if failures:
                wait = min(backoff(failures, self._clock), self._lease / 6)
            if wait > 0:
                self._changed.clear()
                await self._clock.wait_for(self._changed, wait)
                if not failures:
                    continue  # `extend` may have moved the next renewal during the wait
            failures = await self._renew(failures)

    async def _renew(self, failures: int) -> int:
        """Renew the lease once; return the failures in a row, 0 after a success or a loss.

        After a loss there is nothing more to renew, and `keep` ends.
        """
        try:
            async with self._extend_lock:
                if not self._is_ended:
                    await self._extend(self._lease)
        except LockLostError as error:
            self._log(logging.WARNING, str(error))
        except StoreError as error:
            text = (
                f"could not renew the lease of lock {self._key!r} (fence {self._fence}), trying "
                f"again soon: {error}"
            )
            self._log(logging.WARNING, text)
            return failures + 1
        return 0

    async def end(self, keeper: "asyncio.Task[None]") -> bool | None:
        """Release the lock at the end of the block; return True if held until now.

        False means that another process may have had the lock, so the block may have run without
        protection. None means that the database did not say. `keeper` is the task of `keep`.
        """
        self._is_ended = True
        self._changed.set()
        await wait_through_cancel(keeper, KEEPER_LIMIT)
        keeper.cancel()
        if self._is_lost:
            return False
        is_unknown = False
        for _ in range(UNKNOWN_REPEATS):
            try:
                was_held = await self._store.locks.release(self._key, self._token)
            except UnknownOutcomeError:
                is_unknown = True
            except StoreError:
                return None
            else:
                # The unanswered try may have released it.
                return None if is_unknown and not was_held else was_held
        return None

    def _create_lost_error(self) -> LockLostError:
        """Create the error that says why the lock is not held: ended, lost or expired."""
        if self._is_ended:
            text = (
                f"the block of lock {self._key!r} (fence {self._fence}) has ended and released it; "
                "acquire the lock again"
            )
        elif self._is_lost:
            text = (
                f"lock {self._key!r} (fence {self._fence}) is lost: its lease expired or an "
                "operator released it, and another holder may have it; undo or repeat the "
                "work under it"
            )
        else:
            text = (
                f"the lease of lock {self._key!r} (fence {self._fence}) has expired, and another "
                "holder may have the lock; call extend() to query the database"
            )
        return LockLostError(text)


FIRST_PAUSE = 0.01
"""Seconds between the first two tries for a lock that is held elsewhere, with jitter; each
following pause is half as long again.
"""
LAST_PAUSE = 0.5
"""Maximum seconds between two such tries."""


class _LockQueue:
    """The waiting tasks of this process for a key: only the first task queries the database."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.released = asyncio.Event()
        self.waiting = 0


class LockManager:
    """Acquires locks for the application."""

    def __init__(
        self,
        store: "Store",
        shielded: ShieldedCalls,
        log: Log,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._shielded = shielded
        self._log = log
        self._clock = clock or Clock()
        # Event loops of one process share no asyncio locks.
        self._queues: dict[tuple[int, str], _LockQueue] = {}

    @asynccontextmanager
    async def hold(self, key: str, lease: float, wait: float | None) -> AsyncIterator[Lock]:
        """Hold a lock for `broker.lock`, which has checked the arguments; times in seconds.

        If the lock was lost before the end of the block, LockLostError is raised there, or is added
        as a note to the block's own error.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "lock")
        lock = await self._acquire(key, lease, wait)
        keeper = asyncio.create_task(lock.keep(), name="sqlbroker-lock")
        try:
            yield lock
        except BaseException as error:
            if (lost_error := await self._release(lock, keeper)) is not None:
                error.add_note(str(lost_error))
                self._log(logging.WARNING, str(lost_error))
            raise
        if (lost_error := await self._release(lock, keeper)) is not None:
            raise lost_error

    async def _release(self, lock: Lock, keeper: "asyncio.Task[None]") -> LockLostError | None:
        """Release `lock`; return an error if the block may have run unprotected.

        The caller raises it, or adds it to the block's own error. An unconfirmed release (None) is
        only logged if the lease still ran before: then the block was protected.
        """
        was_held = lock.is_held
        is_released = await self._shielded.run(lock.end(keeper))
        # Wake the task of this process that waits for the key first; other processes poll.
        if queue := self._queues.get((id(asyncio.get_running_loop()), lock.key)):
            queue.released.set()
        if is_released or (is_released is None and was_held):
            if is_released is None:
                text = (
                    f"the release of lock {lock.key!r} (fence {lock.fence}) is not confirmed; the "
                    "lock is free when its lease expires, if not before"
                )
                self._log(logging.WARNING, text)
            return None
        return LockLostError(
            f"lock {lock.key!r} (fence {lock.fence}) was lost before its block ended, and another "
            "holder may have had it: part of the block may have run without the lock"
        )

    async def _acquire(self, key: str, lease: float, wait: float | None) -> Lock:
        """Acquire the lock within `wait` seconds; with 0 try once, without the line of waiters.

        Tasks of this process that want the same key stand in a line (`_LockQueue`), so that only
        the first polls the database. The last one to leave removes the line.
        """
        deadline = None if wait is None else self._clock.callers.monotonic() + wait
        token = uuid4()
        queue_key = (id(asyncio.get_running_loop()), key)
        if wait == 0:
            lock = await self._try_acquire(key, token, lease)
            if lock is None:
                raise _create_not_acquired_error(key, wait)
            return lock
        queue = self._queues.setdefault(queue_key, _LockQueue())
        queue.waiting += 1
        try:
            return await self._wait_for_lock(queue, key, token, lease, deadline)
        except TimeoutError:
            raise _create_not_acquired_error(key, wait) from None
        finally:
            queue.waiting -= 1
            if not queue.waiting:
                self._queues.pop(queue_key, None)

    async def _wait_for_lock(
        self, queue: _LockQueue, key: str, token: UUID, lease: float, deadline: float | None
    ) -> Lock:
        """Wait behind earlier callers of this process, then for the lock.

        Only the first caller queries the database. TimeoutError is raised at the deadline. Passing
        errors are retried once the database has answered this caller, or if earlier callers were in
        the line, to whom it may have answered.
        """
        can_retry = queue.turn.locked()  # earlier callers may have reached the database
        clock = self._clock.callers
        async with clock.timeout_at(deadline):
            await queue.turn.acquire()
        pause = FIRST_PAUSE
        failures = 0
        try:
            while True:
                queue.released.clear()
                is_late = deadline is not None and clock.monotonic() >= deadline
                try:
                    lock = await self._try_acquire(key, token, lease)
                    failures = 0
                    can_retry = True
                except TransientStoreError as error:
                    if is_late or not can_retry:
                        raise  # at the first try the address may be wrong
                    lock, failures = None, failures + 1
                    self._log(
                        logging.WARNING, f"could not acquire lock {key!r}, trying again: {error}"
                    )
                if lock is not None:
                    return lock
                if is_late:
                    raise TimeoutError
                step = backoff(failures, clock) if failures else clock.add_jitter(pause)
                pause = min(LAST_PAUSE, pause * 1.5)
                if deadline is not None:
                    step = min(step, deadline - clock.monotonic())
                await clock.wait_for(queue.released, step)
        finally:
            queue.turn.release()

    async def _try_acquire(self, key: str, token: UUID, lease: float) -> Lock | None:
        """Try once to acquire the lock; None if another holder has the lock.

        If the caller is cancelled, or the result stays unknown, the lock is released again. `token`
        identifies the holder in every statement; the fence is the number of the lock.
        """
        started_at = self._clock.monotonic()
        store = self._store

        async def give_back() -> None:
            await store.locks.release(key, token)

        try:
            fence = await self._shielded.run(self._acquire_fence(key, token, lease), give_back)
        except UnknownOutcomeError:
            await try_undo(give_back)
            raise
        if fence is None:
            return None
        return Lock(store, self._log, key, fence, token, lease, started_at, self._clock)

    async def _acquire_fence(self, key: str, token: UUID, lease: float) -> int | None:
        """Acquire the lock for `token`; return the fence number, or None if the lock is held.

        The fence is a counter that each new holder, and each release by an operator, raises. An
        unknown result is tried again with the same token, which finds the lock if the first try
        acquired it.
        """
        for attempt in range(UNKNOWN_REPEATS):
            try:
                return await self._store.locks.acquire(key, token, lease)
            except UnknownOutcomeError:
                # Repeated with the same token: it finds the acquired lock, or acquires it now.
                if attempt == UNKNOWN_REPEATS - 1:
                    raise
        return None


def _create_not_acquired_error(key: str, wait: float | None) -> LockNotAcquiredError:
    """Create the error for a lock that another holder has kept for `wait` seconds."""
    cause = "it is held" if wait == 0 else f"it was not free within {wait} seconds"
    return LockNotAcquiredError(
        f"lock {key!r} was not acquired: {cause}; wait longer, or find its holder with "
        "broker.admin.locks()"
    )
