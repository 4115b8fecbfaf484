"""Operations on the archive: prune old messages and add partitions."""

from faststream_sqlbroker.admin.filters import get_operator_name
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.retention import NO_ARCHIVE, Pruned, Retention, validate_retention
from faststream_sqlbroker.database.retention import Pruner
from faststream_sqlbroker.exceptions import SetupError


class ArchiveOperations(AdminOperations):
    """Operations on old messages and partitions of the archive."""

    async def prune(
        self, retention: Retention, *, dry_run: bool = False, by: str | None = None
    ) -> Pruned:
        """Remove finished messages that are older than `retention` allows, once and now.

        Each transaction removes a thousand messages, with a pause in between, so that consumers are
        hardly slowed down; a million take some minutes. If a call is interrupted, its removals stay
        and the next call continues. Messages that wait or run are never touched.

        Args:
            retention: How long to keep messages.
            dry_run: Remove nothing, only count.
            by: Operator's name for the `audit`; default user and host. An interrupted prune
                stays in the audit, with a note that says so.

        Returns:
            How many messages were removed, or would be.

        Raises:
            SetupError: `retention` is no Retention, `by` is not text, or there is no archive.
        """
        valid_retention = validate_retention(retention)
        if valid_retention is None:
            raise SetupError('prune needs a Retention, such as Retention(completed="30d")')
        if self._store.tables.archive is None:
            raise SetupError(NO_ARCHIVE)
        operator = get_operator_name(by)
        rows = self._writable_store.retention
        pruner = Pruner(rows, valid_retention, Clock())
        if dry_run:
            return await pruner.prune(dry_run=True)
        # Write the entry before the first row is removed, so that a process that is killed half-way
        # has an entry, too.
        job = await rows.record_prune_start(operator, valid_retention.as_json)
        result = await pruner.prune()
        await rows.record_prune_end(job, result)
        return result

    async def add_partitions(self, *, by: str | None = None) -> list[str]:
        """Create missing partitions for the current period and the next four.

        A started broker of the archive's owner does so once an hour, without an entry in the audit.

        Args:
            by: Operator's name for the `audit`; default user and host.

        Returns:
            The names of the created partitions.

        Raises:
            SetupError: the archive has no `archive_partitions`, or `by` is not text.
            AccessError: the user is not the archive's owner.
            SchemaError: the archive in the database is not partitioned yet.
        """
        if not self._store.partitions.is_partitioned:
            raise SetupError(
                "the archive is not partitioned: set "
                'SqlBrokerSchemaConfig(archive_partitions="week") (PostgreSQL only)'
            )
        created = []
        operator = get_operator_name(by)
        while name := await self._writable_store.partitions.add(operator):
            created.append(name)
        return created
