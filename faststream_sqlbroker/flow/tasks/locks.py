"""Locks by key: taken, waited for, kept, extended, and given back at the end of their block."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.times import Duration, lease_seconds
from faststream_sqlbroker.database.messages.handler import refuse_in_handler
from faststream_sqlbroker.exceptions import (
    LockLostError,
    LockNotAcquiredError,
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.loop import Log, backoff
from faststream_sqlbroker.flow.shielded import ShieldedCalls, patiently, quietly

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


# One lock that this process has: kept, extended, given back.

UNKNOWN_REPEATS = 3
"""Tries to find out what became of a COMMIT without an answer."""
KEEPER_LIMIT = 1.0
"""Seconds for a renewal under way at the end of the block."""


class Lock:
    """A lock that this process has taken; made by `broker.lock`.

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
        """`lease` in seconds, `since` by the monotonic clock, before the lock was asked for."""
        self._store = store
        self._log = log
        self._token = token
        self._clock = clock
        self._key = key
        self._fence = fence
        self._lease = lease
        self._since = since
        self._until = since + lease
        self._lost = self._ended = False
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()

    @property
    def key(self) -> str:
        """What is locked."""
        return self._key

    @property
    def fence(self) -> int:
        """How often this key was locked so far, this time included: a later holder's is always
        greater.

        A resource outside of this database can refuse a fence that is lower than one it has seen.
        """
        return self._fence

    @property
    def held(self) -> bool:
        """Whether the lock is ours: false once its lease is known to be gone, or has run out by
        this process's clock.

        What has only run out here may still be ours: `extend` asks the database. False after the
        block.
        """
        return not (self._lost or self._ended) and self._clock.monotonic() < self._until

    def check(self) -> None:
        """Make sure of `held`, without asking the database.

        Raises:
            LockLostError: it is false.
        """
        if not self.held:
            raise self._lost_error()

    async def extend(self, lease: Duration | None = None) -> None:
        """Lengthen the lease from now on, by the database's clock.

        Args:
            lease: Its new length, also for the renewals that follow; None keeps the old one.

        Raises:
            LockLostError: another holder has, or had, the lock since, it was taken away, or the
                block has ended.
            SetupError: `lease` is no length of time longer than 0.
            StoreError: the database refused or could not be reached; the lease is as it was, or
                after an `UnknownOutcomeError` as it was or extended.
        """
        seconds = self._lease if lease is None else lease_seconds(lease)
        async with self._turn:
            await self._extend(seconds)
        self._changed.set()

    async def _extend(self, lease: float) -> None:
        if self._ended or self._lost:
            raise self._lost_error()
        asked = self._clock.monotonic()
        before = self._lease
        until = self._until
        # Should it become shorter, and the answer be lost.
        self._lease = lease
        self._until = min(until, asked + lease)
        try:
            mine = await self._store.locks.extend(self._key, self._token, lease)
        except UnknownOutcomeError:
            raise
        except StoreError:
            self._lease = before
            self._until = until
            raise
        if not mine:
            self._lost = True
            raise self._lost_error()
        self._since = asked
        self._until = asked + lease

    async def keep(self) -> None:
        """Renew after each third of the lease until `end` or until the lock is lost."""
        failures = 0
        while not (self._ended or self._lost):
            due = self._since + self._lease / 3 - self._clock.monotonic()
            if failures:
                due = min(backoff(failures, self._clock), self._lease / 6)
            if due > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with self._clock.timeout(due):
                        await self._changed.wait()
                if not failures:
                    continue  # it may have been extended during the wait
            failures = await self._renew(failures)

    async def _renew(self, failures: int) -> int:
        try:
            async with self._turn:
                if not self._ended:
                    await self._extend(self._lease)
        except LockLostError as error:
            self._log(logging.WARNING, str(error))
        except StoreError as error:
            text = (
                f"the lease of the lock {self._key!r} (fence {self._fence}) was not renewed, "
                f"again soon: {error}"
            )
            self._log(logging.WARNING, text)
            return failures + 1
        return 0

    async def end(self, keeper: "asyncio.Task[None]") -> bool | None:
        """Give it back; whether it was ours to the end, None if the database has not said so."""
        self._ended = True
        self._changed.set()
        await patiently(keeper, KEEPER_LIMIT)
        keeper.cancel()
        if self._lost:
            return False
        unknown = False
        for _ in range(UNKNOWN_REPEATS):
            try:
                mine = await self._store.locks.release(self._key, self._token)
            except UnknownOutcomeError:
                unknown = True
            except StoreError:
                return None
            else:
                # The first time it may have been given back.
                return None if unknown and not mine else mine
        return None

    def _lost_error(self) -> LockLostError:
        if self._ended:
            text = (
                f"the block of the lock {self._key!r} (fence {self._fence}) has ended; lock it anew"
            )
        elif self._lost:
            text = (
                f"the lock {self._key!r} (fence {self._fence}) is lost: its lease ran out or was "
                "taken away, and another holder may have it; undo or repeat what was done under it"
            )
        else:
            text = (
                f"the lease of the lock {self._key!r} (fence {self._fence}) has run out "
                "unrenewed, and another holder may have it; extend() asks the database"
            )
        return LockLostError(text)


FIRST_PAUSE = 0.01
"""Seconds between the first two tries for a lock that is held elsewhere, with jitter; each
following pause is half as long again."""
LAST_PAUSE = 0.5
"""Most seconds between two such tries."""


class _Place:
    """Where those of this process wait for one key, in turn: only the first asks the database."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.freed = asyncio.Event()
        self.waiting = 0


class Locks:
    """Takes locks for the application."""

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
        # Two event loops of a process share nothing.
        self._places: dict[tuple[int, str], _Place] = {}

    @asynccontextmanager
    async def hold(self, key: str, lease: float, wait: float | None) -> AsyncIterator[Lock]:
        """`broker.lock`, with its arguments checked; times in seconds."""
        refuse_in_handler(self._store.dialect, self._store.engine, "lock")
        lock = await self._acquire(key, lease, wait)
        keeper = asyncio.create_task(lock.keep(), name="sqlbroker-lock")
        try:
            yield lock
        except BaseException as error:
            if (lost := await self._end(lock, keeper)) is not None:
                error.add_note(str(lost))
                self._log(logging.WARNING, str(lost))
            raise
        if (lost := await self._end(lock, keeper)) is not None:
            raise lost

    async def _end(self, lock: Lock, keeper: "asyncio.Task[None]") -> LockLostError | None:
        """Give `lock` back; what to say if the block's work may have been without it."""
        held = lock.held
        mine = await self._shielded.run(lock.end(keeper))
        if place := self._places.get((id(asyncio.get_running_loop()), lock.key)):
            place.freed.set()
        if mine or (mine is None and held):
            if mine is None:
                text = (
                    f"the lock {lock.key!r} (fence {lock.fence}) is not known to be given back; "
                    "it is free when its lease has run out"
                )
                self._log(logging.WARNING, text)
            return None
        return LockLostError(
            f"the lock {lock.key!r} (fence {lock.fence}) was lost before the end of its block, "
            "and another holder may have had it: what the block did may have been unprotected"
        )

    async def _acquire(self, key: str, lease: float, wait: float | None) -> Lock:
        deadline = None if wait is None else self._clock.callers.monotonic() + wait
        token = uuid4()
        place = (id(asyncio.get_running_loop()), key)
        if wait == 0:
            lock = await self._try(key, token, lease)
            if lock is None:
                raise _not_acquired(key, wait)
            return lock
        here = self._places.setdefault(place, _Place())
        here.waiting += 1
        try:
            return await self._wait(here, key, token, lease, deadline)
        except TimeoutError:
            raise _not_acquired(key, wait) from None
        finally:
            here.waiting -= 1
            if not here.waiting:
                self._places.pop(place, None)

    async def _wait(
        self, here: _Place, key: str, token: UUID, lease: float, deadline: float | None
    ) -> Lock:
        """Wait for our turn in this process, then for the lock; TimeoutError at the deadline."""
        patient = here.turn.locked()
        clock = self._clock.callers
        async with clock.timeout_at(deadline):
            await here.turn.acquire()
        pause = FIRST_PAUSE
        failures = 0
        try:
            while True:
                here.freed.clear()
                late = deadline is not None and clock.monotonic() >= deadline
                try:
                    lock = await self._try(key, token, lease)
                    failures = 0
                    patient = True
                except TransientStoreError as error:
                    if late or not patient:
                        raise  # at the very first try it may be a wrong address
                    lock, failures = None, failures + 1
                    self._log(logging.WARNING, f"waiting for the lock {key!r}: {error}")
                if lock is not None:
                    return lock
                if late:
                    raise TimeoutError
                step = backoff(failures, clock) if failures else clock.jitter(pause)
                pause = min(LAST_PAUSE, pause * 1.5)
                end = clock.monotonic() + step
                with suppress(TimeoutError):
                    async with clock.timeout_at(end if deadline is None else min(end, deadline)):
                        await here.freed.wait()
        finally:
            here.turn.release()

    async def _try(self, key: str, token: UUID, lease: float) -> Lock | None:
        """Take the lock if it is free; cancelled, or without an answer, it is given back."""
        asked = self._clock.monotonic()
        store = self._store

        async def give_back() -> None:
            await store.locks.release(key, token)

        try:
            fence = await self._shielded.run(self._fence(key, token, lease), give_back)
        except UnknownOutcomeError:
            await quietly(give_back)
            raise
        if fence is None:
            return None
        return Lock(store, self._log, key, fence, token, lease, asked, self._clock)

    async def _fence(self, key: str, token: UUID, lease: float) -> int | None:
        for last in range(UNKNOWN_REPEATS):
            try:
                return await self._store.locks.acquire(key, token, lease)
            except UnknownOutcomeError:
                # Repeated with the same token it finds out, or takes what was not taken.
                if last == UNKNOWN_REPEATS - 1:
                    raise
        return None


def _not_acquired(key: str, wait: float | None) -> LockNotAcquiredError:
    what = "it is taken" if wait == 0 else f"it was taken for {wait} seconds"
    return LockNotAcquiredError(
        f"the lock {key!r} was not acquired: {what}; wait longer, or ask broker.admin.locks() who "
        "has it"
    )
