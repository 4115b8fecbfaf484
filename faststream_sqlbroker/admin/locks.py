"""Locks that are held."""

from faststream_sqlbroker.admin.arguments import check_limit, operator_name
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.status import HeldLock
from faststream_sqlbroker.core.text import short


class Locks(Operations):
    """The locks of `broker.lock`."""

    async def locks(self, *, limit: int = 100) -> list[HeldLock]:
        """The locks of `broker.lock` that have a holder now, sorted by key.

        Args:
            limit: Most locks to return; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return list(await self._store.locks.held(limit))

    async def release_lock(self, key: str, *, by: str | None = None) -> bool:
        """Take the lock `key` from its holder; another process can lock it from now on.

        The holder is not stopped. It learns of it at its next renewal, at the latest after a third
        of its lease. Its fence is lower than every later one.

        Args:
            key: That of the lock.
            by: Who does it, as text, for the `audit`; default user and host.

        Returns:
            Whether the lock had a holder; the holder's lease may have run out already.

        Raises:
            ValueError: `key` is not a valid key.
            SetupError: `by` is not text.
        """
        if (problem := name_problem(key)) is not None:
            msg = f"{short(key)} cannot be the key of a lock: {problem}"
            raise ValueError(msg)
        return await self._changing.locks.force(key, operator_name(by))
