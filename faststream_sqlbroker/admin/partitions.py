"""Partitions of the archive."""

from faststream_sqlbroker.admin.arguments import operator_name
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.exceptions import SetupError


class ArchivePartitioning(Operations):
    """`add_partitions`."""

    async def add_partitions(self, *, by: str | None = None) -> list[str]:
        """Make the partitions that are missing of the current period and of the next four.

        A started broker of the archive's owner does so once an hour, without an entry of the audit.

        Args:
            by: Who does it, as text, for the `audit`; default the host and the process id.

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
