"""Locks by key: taken, waited for, and given back at the end of their block."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from faststream_sqlbroker.exceptions import (
    LockLostError,
    LockNotAcquiredError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.held_lock import UNKNOWN_REPEATS, Lock
from faststream_sqlbroker.flow.loop import Log, backoff
from faststream_sqlbroker.flow.unheeded import Unheeded, quietly

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

FIRST_PAUSE, LAST_PAUSE = 0.01, 0.5
"""Seconds between two tries for a lock that somebody else has, with jitter; each half as long again."""


class _Place:
    """Where those of this process wait for one key, in turn: only the first asks the database."""

    def __init__(self) -> None:
        self.turn, self.freed, self.waiting = asyncio.Lock(), asyncio.Event(), 0


class Locks:
    """Takes locks for the application."""

    def __init__(self, store: "Store", unheeded: Unheeded, log: Log) -> None:
        """Nobody waits."""
        self._store, self._unheeded, self._log = store, unheeded, log
        # Two event loops of a process share nothing.
        self._places: dict[tuple[int, str], _Place] = {}

    @asynccontextmanager
    async def hold(self, key: str, lease: float, wait: float | None) -> AsyncIterator[Lock]:
        """`broker.lock`, with its arguments checked; times in seconds."""
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
        mine = await self._unheeded.run(lock.end(keeper))
        if place := self._places.get((id(asyncio.get_running_loop()), lock.key)):
            place.freed.set()
        if mine or (mine is None and held):
            if mine is None:
                text = (
                    f"the lock {lock.key!r} (fence {lock.fence}) is not known to be given back; it is free when its "
                    "lease has run out"
                )
                self._log(logging.WARNING, text)
            return None
        return LockLostError(
            f"the lock {lock.key!r} (fence {lock.fence}) was lost before the end of its block, and somebody else "
            "may have had it: what the block did may have been unprotected"
        )

    async def _acquire(self, key: str, lease: float, wait: float | None) -> Lock:
        loop = asyncio.get_running_loop()
        deadline, token, place = (
            None if wait is None else loop.time() + wait,
            uuid4(),
            (id(loop), key),
        )
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
        async with asyncio.timeout_at(deadline):
            await here.turn.acquire()
        clock, pause, failures = asyncio.get_running_loop().time, FIRST_PAUSE, 0
        try:
            while True:
                here.freed.clear()
                late = deadline is not None and clock() >= deadline
                try:
                    lock, failures, patient = await self._try(key, token, lease), 0, True
                except TransientStoreError as error:
                    if late or not patient:
                        raise  # at the very first try it may be a wrong address
                    lock, failures = None, failures + 1
                    self._log(logging.WARNING, f"waiting for the lock {key!r}: {error}")
                if lock is not None:
                    return lock
                if late:
                    raise TimeoutError
                step = backoff(failures) if failures else pause * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
                pause = min(LAST_PAUSE, pause * 1.5)
                end = clock() + step
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(end if deadline is None else min(end, deadline)):
                        await here.freed.wait()
        finally:
            here.turn.release()

    async def _try(self, key: str, token: UUID, lease: float) -> Lock | None:
        """Take the lock if it is free; cancelled, or without an answer, it is given back."""
        asked, store = monotonic(), self._store

        async def give_back() -> None:
            await store.locks.release(key, token)

        try:
            fence = await self._unheeded.run(self._fence(key, token, lease), give_back)
        except UnknownOutcomeError:
            await quietly(give_back)
            raise
        return None if fence is None else Lock(store, self._log, key, fence, token, lease, asked)

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
    what = "somebody has it" if wait == 0 else f"somebody else had it for {wait} seconds"
    return LockNotAcquiredError(
        f"the lock {key!r} was not acquired: {what}; wait longer, or ask broker.admin.locks() who has it"
    )
