"""How many messages of a queue are due."""

from typing import TYPE_CHECKING

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.live_queues import due_messages
from faststream_sqlbroker.database.pool import check_same_database

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Depths:
    """Counts them, up to a limit.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._engine = database.engine
        self._errors = database.errors
        self._dialect = database.dialect

    async def read(
        self, queue: str, most: int, connection: AsyncConnection | AsyncSession | None = None
    ) -> int:
        """The messages of `queue` that are due and not leased; `most` if there are more.

        With `connection`, as the caller's transaction sees it. Another one could be waited for in
        vain: all of the pool may be transactions that publish.

        Raises:
            PublishError: as `Store.insert_in`.
        """
        if connection is None:
            return await self._database.run(
                lambda c: due_messages(c, self._dialect, queue, most),
                Activity.PUBLISH,
                Activity.COUNT,
                write=False,
            )
        try:
            if isinstance(connection, AsyncSession):
                connection = await connection.connection()
            return await connection.run_sync(lambda c: self._read_on(c, queue, most))
        except SQLAlchemyError as error:
            raise self._errors.of_caller(error) from error

    def read_sync(self, connection: "Connection | Session", queue: str, most: int) -> int:
        """`read` of the caller's transaction, for synchronous code.

        Raises:
            PublishError: as `Store.insert_in`.
        """
        try:
            if not isinstance(connection, Connection):
                connection = connection.connection()
            return self._read_on(connection, queue, most)
        except SQLAlchemyError as error:
            raise self._errors.of_caller(error) from error

    def _read_on(self, connection: Connection, queue: str, most: int) -> int:
        check_same_database(connection, self._engine.sync_engine)
        return due_messages(connection, self._dialect, queue, most)
