"""Operations on locks that have a holder."""

from faststream_sqlbroker.admin.filters import check_limit, get_operator_name
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.checks import find_name_error
from faststream_sqlbroker.core.status import HeldLock
from faststream_sqlbroker.core.text import format_value


class LockOperations(AdminOperations):
    """Operations on the locks of `broker.lock`."""

    async def locks(self, *, limit: int = 100) -> list[HeldLock]:
        """List the locks of `broker.lock` that have a holder now, sorted by key.

        Args:
            limit: Maximum number of locks; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return list(await self._store.locks.list_held(limit))

    async def release_lock(self, key: str, *, by: str | None = None) -> bool:
        """Release the lock `key` by force; other processes can acquire the lock from now on.

        The holder is not stopped. It learns of the release at its next renewal, at the latest after
        a third of its lease. Its fence is lower than every later one.

        Args:
            key: Key of the lock.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            True if the lock had a holder, whose lease may have expired already.

        Raises:
            ValueError: `key` is not a valid key.
            SetupError: `by` is not text.
        """
        if (problem := find_name_error(key)) is not None:
            msg = f"{format_value(key)} cannot be the key of a lock: {problem}"
            raise ValueError(msg)
        return await self._writable_store.locks.force_release(key, get_operator_name(by))
