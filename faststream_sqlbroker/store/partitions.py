"""Adds and drops partitions of the archive; each step is one transaction."""

import asyncio
from collections.abc import Callable
from datetime import datetime

from sqlalchemy import Connection

from faststream_sqlbroker.schema import partitions
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.store.transaction import Transactions


class ArchivePartitions:
    """Only for PostgreSQL's archives with partitions.

    Raises (from every operation):
        AccessError: the user is not the archive's owner.
        TransientStoreError: a lock was not free within 2 seconds, or as `Store`.
        StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, tables: Tables, places: asyncio.Semaphore
    ) -> None:
        """Each step takes one of the store's `places`."""
        self._transactions = transactions.doing()
        self._config = tables.config
        self._places = places

    @property
    def there(self) -> bool:
        """Whether the archive has partitions."""
        return self._config.archive_partitions is not None

    async def add(self) -> str | None:
        """Make the next that is missing; its name, or None: none is missing."""
        return await self._run(lambda c: partitions.add_partition(c, self._config))

    async def drop(self, before: datetime, *, empty: bool) -> str | None:
        """Drop the oldest that ended by `before`, with `empty` one without rows; its name."""
        return await self._run(
            lambda c: partitions.drop_partition(c, self._config, before, empty=empty)
        )

    async def _run(self, work: Callable[[Connection], str | None]) -> str | None:
        # Who waits for a lock on the archive holds up all that comes later: rather try again.
        return await self._transactions.run(work, self._places, patient=False)
