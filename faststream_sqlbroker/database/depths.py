"""Count the due messages of a queue."""

from typing import TYPE_CHECKING

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.live_queues import count_due
from faststream_sqlbroker.database.pool import check_same_database

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class QueueDepths:
    """Numbers of due messages, counted up to a limit.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._engine = database.engine
        self._errors = database.errors
        self._dialect = database.dialect

    async def count(
        self, queue: str, limit: int, connection: AsyncConnection | AsyncSession | None = None
    ) -> int:
        """Count the messages of `queue` that are due and not leased, up to `limit`.

        With `connection`, count in the caller's transaction. A connection of the pool might never
        become free, because transactions that publish may hold all of them.

        Raises:
            PublishError: as `Store.insert_in`.
        """
        if connection is None:
            return await self._database.run(
                lambda c: count_due(c, self._dialect, queue, limit),
                Activity.PUBLISH,
                Activity.COUNT,
                write=False,
            )
        try:
            if isinstance(connection, AsyncSession):
                connection = await connection.connection()
            return await connection.run_sync(lambda c: self._count_due(c, queue, limit))
        except SQLAlchemyError as error:
            raise self._errors.convert_caller_error(error) from error

    def read_sync(self, connection: "Connection | Session", queue: str, limit: int) -> int:
        """Count the messages of `queue` in the caller's transaction, for synchronous code.

        Raises:
            PublishError: as `Store.insert_in`.
        """
        try:
            if not isinstance(connection, Connection):
                connection = connection.connection()
            return self._count_due(connection, queue, limit)
        except SQLAlchemyError as error:
            raise self._errors.convert_caller_error(error) from error

    def _count_due(self, connection: Connection, queue: str, limit: int) -> int:
        check_same_database(connection, self._engine.sync_engine)
        return count_due(connection, self._dialect, queue, limit)
