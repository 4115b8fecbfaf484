"""What an operator asks of the broker, and tells it."""

from typing import TYPE_CHECKING

from faststream_sqlbroker.core.locks import HeldLock
from faststream_sqlbroker.core.names import name_problem
from faststream_sqlbroker.core.rows import UnknownOutcome
from faststream_sqlbroker.core.text import short

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

__all__ = ("Admin", "HeldLock", "UnknownOutcome")


class Admin:
    """`broker.admin`: needs the database, but no running broker.

    Raises (from every operation):
        TransientStoreError: the database could not be reached or was busy.
        StoreError: the database refused the statement.
    """

    def __init__(self, store: "Store") -> None:
        """Work on the tables of `store`."""
        self._store = store

    async def unknown(self, queue: str | None = None, *, limit: int = 100) -> list[UnknownOutcome]:
        """Messages of which nobody knows whether their handler has run, or how far it came; the oldest first.

        `AckPolicy.ACK_FIRST` removes a message before its handler starts. It is listed here when its process
        has not been heard of for `release_stuck_timeout` since, when the answer to the removal's COMMIT was lost
        (and it was committed), or when its handler was cancelled at the end of `graceful_timeout`. The message
        itself is in the archive.

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

        The holder is not stopped: it finds out at its next renewal, after a third of its lease at the latest. Its
        fence is lower than every fence given out from now on.

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
