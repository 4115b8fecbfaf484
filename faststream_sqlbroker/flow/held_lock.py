"""One lock that this process has: kept, extended, given back."""

import asyncio
import logging
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING
from uuid import UUID

from faststream_sqlbroker.core.duration import Duration
from faststream_sqlbroker.core.lengths import lease_seconds
from faststream_sqlbroker.exceptions import LockLostError, StoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.loop import Log, backoff
from faststream_sqlbroker.flow.unheeded import patiently

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

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
    ) -> None:
        """`lease` in seconds, `since` by the monotonic clock, before the lock was asked for."""
        self._store, self._log, self._token = store, log, token
        self._key, self._fence, self._lease = key, fence, lease
        self._since, self._until = since, since + lease
        self._lost = self._ended = False
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()

    @property
    def key(self) -> str:
        """What is locked."""
        return self._key

    @property
    def fence(self) -> int:
        """How often this key was locked so far, this time included: a later holder's is always greater.

        Whoever guards something outside of this database can refuse a fence lower than one it has seen.
        """
        return self._fence

    @property
    def held(self) -> bool:
        """Whether the lock is ours: false once its lease is known to be gone, or has run out by this process's clock.

        What has only run out here may still be ours: `extend` asks the database. False after the block.
        """
        return not (self._lost or self._ended) and monotonic() < self._until

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
            LockLostError: somebody else has, or had, the lock since, it was taken away, or the block has ended.
            SetupError: `lease` is no length of time longer than 0.
            StoreError: the database refused or could not be reached; the lease is as it was, or after an
                `UnknownOutcomeError` as it was or extended.
        """
        seconds = self._lease if lease is None else lease_seconds(lease)
        async with self._turn:
            await self._extend(seconds)
        self._changed.set()

    async def _extend(self, lease: float) -> None:
        if self._ended or self._lost:
            raise self._lost_error()
        asked, before, until = monotonic(), self._lease, self._until
        # Should it become shorter, and the answer be lost.
        self._lease, self._until = lease, min(until, asked + lease)
        try:
            mine = await self._store.locks.extend(self._key, self._token, lease)
        except UnknownOutcomeError:
            raise
        except StoreError:
            self._lease, self._until = before, until
            raise
        if not mine:
            self._lost = True
            raise self._lost_error()
        self._since, self._until = asked, asked + lease

    async def keep(self) -> None:
        """Renew after each third of the lease until `end` or until the lock is lost."""
        failures = 0
        while not (self._ended or self._lost):
            due = self._since + self._lease / 3 - monotonic()
            if failures:
                due = min(backoff(failures), self._lease / 6)
            if due > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(due):
                        await self._changed.wait()
                if not failures:
                    continue  # it may have been extended meanwhile
            failures = await self._renew(failures)

    async def _renew(self, failures: int) -> int:
        try:
            async with self._turn:
                if not self._ended:
                    await self._extend(self._lease)
        except LockLostError as error:
            self._log(logging.WARNING, str(error))
        except StoreError as error:
            text = f"the lease of the lock {self._key!r} (fence {self._fence}) was not renewed, again soon: {error}"
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
                f"the lock {self._key!r} (fence {self._fence}) is lost: its lease ran out or was taken away, "
                "and somebody else may have it; undo or repeat what was done under it"
            )
        else:
            text = (
                f"the lease of the lock {self._key!r} (fence {self._fence}) has run out unrenewed, and "
                "somebody else may have it; extend() asks the database"
            )
        return LockLostError(text)
