"""Removing old messages from the archive."""

from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.retention import NO_ARCHIVE, Pruned, Retention, checked_retention
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.store.pruner import Pruner


class ArchivePruning(Operations):
    """`prune`."""

    async def prune(self, retention: Retention, *, dry_run: bool = False) -> Pruned:
        """Remove finished messages that are older than `retention` keeps, now and once.

        A thousand of them are removed in each transaction, with a rest in between, so that
        consumers lose little; a million take some minutes. What a call that was cut off has removed
        is gone; the next one goes on. Messages that wait or run are never touched.

        Args:
            retention: What to keep.
            dry_run: Remove nothing, only count.

        Returns:
            How many were removed, or would be.

        Raises:
            SetupError: `retention` is no Retention, or there is no archive.
        """
        checked = checked_retention(retention)
        if checked is None:
            raise SetupError('prune needs a Retention, such as Retention(completed="30d")')
        if self._store.tables.archive is None:
            raise SetupError(NO_ARCHIVE)
        return await Pruner(self._store.retention, checked, Clock()).prune(dry_run=dry_run)
