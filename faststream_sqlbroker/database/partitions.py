"""Adds and drops partitions of the archive; each step is one transaction."""

from collections.abc import Callable
from datetime import datetime

from sqlalchemy import Connection

from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.schema import partitions
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig


class ArchivePartitions:
    """Only for PostgreSQL's archives with partitions.

    Raises (from every operation):
        AccessError: the user is not the archive's owner.
        TransientStoreError: a lock was not free within 2 seconds, or as `Store`.
        StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._config = database.tables.config

    @property
    def there(self) -> bool:
        """Whether the archive has partitions."""
        return self._config.archive_partitions is not None

    async def add(self, by: str | None = None) -> str | None:
        """Make the next that is missing, and note who did unless `by` is None; its name, or None:
        none is missing.
        """
        return await self._run(lambda c: add_noted(c, self._dialect, self._config, by))

    async def drop(self, before: datetime, *, empty: bool) -> str | None:
        """Drop the oldest that ended by `before`, with `empty` one without rows; its name."""
        return await self._run(
            lambda c: partitions.drop_partition(c, self._config, before, empty=empty)
        )

    async def _run(self, work: Callable[[Connection], str | None]) -> str | None:
        # Who waits for a lock on the archive holds up all that comes later: rather try again.
        return await self._database.run(work, patient=False)


def add_noted(
    connection: Connection, dialect: Dialect, config: SqlBrokerSchemaConfig, by: str | None
) -> str | None:
    """Make the next partition that is missing; unless `by` is None, the audit names who did."""
    name = partitions.add_partition(connection, config)
    if name is not None and by is not None:
        note_action(connection, dialect, "add_partition", by, {"partition": name})
    return name
