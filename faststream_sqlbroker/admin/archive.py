"""The archive: old messages are removed, and partitions are added."""

from faststream_sqlbroker.admin.arguments import operator_name
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.retention import NO_ARCHIVE, Pruned, Retention, checked_retention
from faststream_sqlbroker.database.retention import Pruner
from faststream_sqlbroker.exceptions import SetupError


class Archive(Operations):
    """Old messages and partitions of the archive."""

    async def prune(
        self, retention: Retention, *, dry_run: bool = False, by: str | None = None
    ) -> Pruned:
        """Remove finished messages that are older than `retention` keeps, now and once.

        A thousand of them are removed in each transaction, with a rest in between, so that
        consumers lose little; a million take some minutes. What a call that was cut off has removed
        is gone; the next one goes on. Messages that wait or run are never touched.

        Args:
            retention: What to keep.
            dry_run: Remove nothing, only count.
            by: Who does it, as text, for the `audit`; default user and host. A prune
                that was cut off stays in the audit, with a note that says so.

        Returns:
            How many were removed, or would be.

        Raises:
            SetupError: `retention` is no Retention, `by` is not text, or there is no archive.
        """
        checked = checked_retention(retention)
        if checked is None:
            raise SetupError('prune needs a Retention, such as Retention(completed="30d")')
        if self._store.tables.archive is None:
            raise SetupError(NO_ARCHIVE)
        who = operator_name(by)
        rows = self._changing.retention
        pruner = Pruner(rows, checked, Clock())
        if dry_run:
            return await pruner.prune(dry_run=True)
        # Noted before the first row goes: a process that is killed half-way has an entry, too.
        begun = await rows.note_prune(who, checked.as_json)
        pruned = await pruner.prune()
        await rows.note_pruned(begun, pruned)
        return pruned

    async def add_partitions(self, *, by: str | None = None) -> list[str]:
        """Make the partitions that are missing of the current period and of the next four.

        A started broker of the archive's owner does so once an hour, without an entry of the audit.

        Args:
            by: Who does it, as text, for the `audit`; default user and host.

        Returns:
            The names of those that were made.

        Raises:
            SetupError: the archive has no `archive_partitions`, or `by` is not text.
            AccessError: the user is not the archive's owner.
            SchemaError: the archive in the database is not partitioned yet.
        """
        if not self._store.partitions.there:
            raise SetupError(
                'the archive has no partitions: SqlBrokerSchemaConfig(archive_partitions="week") '
                "names them (PostgreSQL only)"
            )
        made = []
        who = operator_name(by)
        while name := await self._changing.partitions.add(who):
            made.append(name)
        return made
