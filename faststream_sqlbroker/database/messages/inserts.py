"""Inserts of new messages: in a transaction of the broker, or in the caller's."""

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.driver import BusyError
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.messages.handler import HandlerTransaction, Ids
from faststream_sqlbroker.database.messages.publish_coalescer import PublishCoalescer
from faststream_sqlbroker.database.parts.mirror_rows import insert_for_caller, insert_mirrored
from faststream_sqlbroker.database.parts.sizes import MAX_STATEMENT_BYTES, count_bytes
from faststream_sqlbroker.database.pool import check_same_database, is_known_database
from faststream_sqlbroker.database.query import Query

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Inserts:
    """Inserts new messages."""

    def __init__(self, database: Database) -> None:
        """Insert within the time limit of `database`."""
        self._database = database
        self._engine = database.engine
        self._dialect = database.dialect
        self._errors = database.errors
        self._shortcut = database.shortcut
        self._coalescer: PublishCoalescer | None = None

    def insert(self, rows: Sequence[NewMessage]) -> Awaitable[Ids]:
        """Insert `rows` in a transaction of the broker, which rows of other publishes may share.

        Messages with a lookup value (also stored in the policy state, for searches) or a
        `dedup_id`, and very large calls, get a transaction of their own.

        Raises:
            MessageTooLargeError: a row exceeds the database's limit; nothing was sent.
        """
        coalescer = self._loop_coalescer
        size = self._check_size(rows)
        for row in rows:
            if row.lookup is not None:
                return self._database.run(
                    lambda c: insert_mirrored(self._dialect, c, rows),
                    Activity.PUBLISH,
                    Activity.MIRROR,
                    connection_slots=coalescer.connection_slot,
                )
        if size > MAX_STATEMENT_BYTES:
            return self._database.run(
                lambda c: self._dialect.insert(c, rows),
                Activity.PUBLISH,
                connection_slots=coalescer.connection_slot,
            )
        for row in rows:
            if row.dedup_id is not None:
                # Not shared: the insert waits while another transaction holds the same dedup_id,
                # and all publishes in the same statement would wait, too.
                return self._database.run(
                    self._dialect.build_insert(rows),
                    Activity.PUBLISH,
                    connection_slots=coalescer.connection_slot,
                )
        return coalescer.insert(rows)

    def refuse_too_large(self, rows: Sequence[NewMessage]) -> None:
        """Refuse rows that are too large. The limit is known once a connection was made.

        Raises:
            MessageTooLargeError: a row exceeds the database's limit.
        """
        self._check_size(rows)

    def _check_size(self, rows: Sequence[NewMessage]) -> int:
        """Return the bytes of `rows`; raise `MessageTooLargeError` for a row over the known limit.

        The limit is known once a connection was made. Before that, the insert itself checks the
        rows.
        """
        size = count_bytes(rows)
        if (limit := self._dialect.known_size_limit) is not None:
            limit.check(rows, size)
        return size

    async def run(self, query: Query[None]) -> None:
        """Run `query` (a wake-up) on the connection for publishing, after earlier inserts.

        A wake-up that came before them would find nothing to claim.
        """
        if self._shortcut.is_possible:
            await self._loop_coalescer.run(query)
        else:
            connection_slot = self._loop_coalescer.connection_slot
            await self._database.run(
                query, Activity.PUBLISH, connection_slots=connection_slot, locks=False
            )

    async def close(self) -> None:
        """Return the connection for publishing to the pool.

        A coalescer of another event loop is only forgotten: it can be closed in that loop alone.
        """
        coalescer, self._coalescer = self._coalescer, None
        if coalescer is not None and coalescer.loop is asyncio.get_running_loop():
            await coalescer.close()

    @property
    def _loop_coalescer(self) -> PublishCoalescer:
        """The running event loop's coalescer, which merges concurrent publishes into statements.

        A coalescer of another event loop can be neither used nor closed here, so it is replaced.
        """
        coalescer = self._coalescer
        if coalescer is None or coalescer.loop is not asyncio.get_running_loop():
            self._database.checkouts.pools.refuse_other_loop()
            coalescer = self._coalescer = PublishCoalescer(self._database)
        return coalescer

    async def insert_in(
        self,
        connection: AsyncConnection | AsyncSession | HandlerTransaction,
        rows: Sequence[NewMessage],
    ) -> Ids:
        """Insert `rows` in the caller's transaction, without a start, commit or flush.

        Raises:
            PublishError: the connection is closed or leads to another database, or its transaction
                has ended.
            SetupError: another event loop, which is still open, uses the broker.
        """
        if isinstance(connection, HandlerTransaction):
            return await connection.publish(lambda own: self.insert_in(own, rows))
        self._database.checkouts.pools.refuse_other_loop()
        try:
            if isinstance(connection, AsyncSession):
                connection = await connection.connection()
            sync_connection = connection.sync_connection
            if not is_known_database(sync_connection, self._engine.sync_engine):
                await connection.run_sync(check_same_database, self._engine.sync_engine)
            if (
                sync_connection is not None
                and self._shortcut.can_try_inside(sync_connection)
                and self._check_size(rows) <= MAX_STATEMENT_BYTES
                and all(row.lookup is None for row in rows)
            ):
                query: Any = self._dialect.build_insert(rows)
                # Busy: the driver has sent nothing, and SQLAlchemy sends the rows below.
                with contextlib.suppress(BusyError):
                    return cast("Ids", await self._shortcut.fetch_in_transaction(connection, query))
            return await connection.run_sync(lambda c: insert_for_caller(self._dialect, c, rows))
        except SQLAlchemyError as error:
            # Errors of asyncpg's own connection pass no listener of the engine.
            self._database.checkouts.evict_if_read_only(error)
            raise self._errors.convert_caller_error(error) from error

    def insert_sync(self, connection: "Connection | Session", rows: Sequence[NewMessage]) -> Ids:
        """Insert as `insert_in`, for synchronous code.

        Raises:
            PublishError: as `insert_in`.
        """
        try:
            if not isinstance(connection, Connection):
                connection = connection.connection()
            check_same_database(connection, self._engine.sync_engine)
            return insert_for_caller(self._dialect, connection, rows)
        except SQLAlchemyError as error:
            raise self._errors.convert_caller_error(error) from error
