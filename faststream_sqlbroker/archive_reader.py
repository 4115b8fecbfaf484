"""`broker.archive`: read archived messages as Arrow record batches, each row once.

Requires the extra `arrow`.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Self

from sqlalchemy.util import await_only

from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import Duration, parse_non_negative
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError, StoreError
from pyspark_sqlbroker.address import DATABASE_KINDS, Address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.horizon import Horizon, find_horizon
from pyspark_sqlbroker.load.archive_pages import (
    ArchivePage,
    ArchivePosition,
    parse_position,
    read_page,
)
from pyspark_sqlbroker.load.selection import ARCHIVE, Selection, select_rows
from pyspark_sqlbroker.moments import MIN_TIME, TimeInput

if TYPE_CHECKING:
    import pyarrow as pa

    from faststream_sqlbroker.database.store import Store

BATCH_ROWS = 10_000
"""Default for the maximum number of rows in a batch."""

FIRST_ROWS = 10
"""Maximum rows of the first batch, when the size of bodies is unknown: to measure a body, MySQL and
MariaDB read it completely.
"""


class Archive:
    """Access to archived messages. Needs the database, but no started broker."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def read(
        self,
        after: TimeInput | None = None,
        *,
        queues: Iterable[str] | None = None,
        states: Iterable[str | MessageState] | None = None,
        decode: bool = False,
        batch_rows: int = BATCH_ROWS,
        safety_lag: Duration = "5m",
        margin: Duration = "2s",
    ) -> "ArchiveReader":
        """Read messages archived after a watermark, in the order of `archived_at`.

            reader = broker.archive.read(after=watermark)
            async for batch in reader:
                ...
            watermark = reader.watermark

        If every read starts after the watermark of the previous one, each row of the archive is
        returned exactly once. This includes rows whose transaction commits late, and messages that
        were retried for days and have an old id. To guarantee this, a read ends at the horizon: the
        time before which no new row can appear. Later rows are returned by the next read. A message
        that is redriven and ends again gets a new row.

        Each batch is read in its own transaction, bounded by `statement_timeout`. No connection and
        no snapshot are held between batches, so a slow reader does not hold back vacuum. Rows
        deleted before their batch is read are not returned.

        Args:
            after: The `watermark` of an earlier reader, or a time; rows archived before it are
                skipped. None starts with the oldest row.
            queues: Read only these queues. A watermark is valid only for the queues and states that
                it was read with.
            states: Read only these states.
            decode: Add a string column `body`: the body as JSON text, by the rules of
                `decode_payload`. Text becomes a JSON string; a body that is neither JSON nor text
                by its content type is NULL.
            batch_rows: Maximum rows in a batch. A batch also ends with the row that reaches 8 MiB.
                The first batch has at most 10 rows, each later one at most twice as many as the
                previous one.
            safety_lag: Longest possible transaction, assumed where running transactions cannot be
                observed: on PostgreSQL without `pg_read_all_stats`, on MySQL and MariaDB without
                PROCESS, and for the other reasons listed at `find_horizon`. Rows of this period are
                left to a later read.
            margin: Longest time between the start of a statement and the moment the server shows it
                as running.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
            MissingExtraError: pyarrow is not installed.
        """
        try:
            from pyspark_sqlbroker.load.rows import to_arrow_schema  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            if error.name != "pyarrow":
                raise
            msg = "'pyarrow' is not installed: pip install 'sqlbroker[arrow]'"
            raise MissingExtraError(msg) from error
        table = self._store.tables.archive
        if table is None:
            raise SetupError(
                "the schema has no archive table to read (message_archive_table_name=None)"
            )
        url = self._store.engine.url
        selection = select_rows(ARCHIVE, table.name, table.schema, queues=queues, states=states)
        return ArchiveReader(
            self._store,
            Address(DATABASE_KINDS[self._store.dialect_name], "", {}, url),
            selection,
            parse_position("after", after),
            validate_integer("batch_rows", batch_rows),
            partial(
                find_horizon,
                safety_lag=parse_non_negative("safety_lag", safety_lag),
                margin=parse_non_negative("margin", margin),
                # If the answer is delayed, the safety lag is used before the statement timeout.
                patience=self._store.statement_timeout / 2,
                sleep=lambda seconds: await_only(asyncio.sleep(seconds)),
            ),
            to_arrow_schema(selection.fields, with_body=decode),
        )


class ArchiveReader:
    """One read of the archive: an asynchronous iterator of Arrow record batches.

    An error does not end the read: request the next batch again, or continue with a new reader from
    the watermark.

    Raises (from the iteration):
        RuntimeError: another task is waiting for the next batch of this reader.
        TransientStoreError: the database could not be reached or was busy; try again.
        StoreError: the database refused the statement, or a row has a value that the type of its
            column does not allow.

    Attributes:
        schema: The Arrow schema of every batch, with the columns and types of Spark's
            `ARCHIVE_SCHEMA`: `payload` is binary, times are microseconds in UTC.
        horizon: The end of the read and how it was determined, a `Horizon`; None before the first
            batch is requested.
    """

    def __init__(
        self,
        store: "Store",
        address: Address,
        selection: Selection,
        start: ArchivePosition | None,
        batch_rows: int,
        find: Callable[..., Horizon],
        schema: "pa.Schema",
    ) -> None:
        """Create a reader; nothing is read before the first iteration.

        `start` is the position after which rows are read. `find` determines the horizon: the time
        before which every archived row is committed, at which the read ends.
        """
        self._store = store
        self._database = get_database(address)
        self._selection = selection
        self._position = start
        self._batch_rows = batch_rows
        self._max_rows = min(batch_rows, FIRST_ROWS)
        self._find = find
        self._is_last = False
        self._lock = asyncio.Lock()
        self.schema = schema
        self.horizon: Horizon | None = None

    @property
    def watermark(self) -> str | None:
        """The position after the last returned row, as text, for `after` of the next read.

        Store it together with the batches, or after they are stored: after each batch, or once at
        the end. None if nothing has been read since the beginning.
        """
        return None if self._position is None else str(self._position)

    def __aiter__(self) -> Self:
        """Return this reader; a second loop continues after the last returned batch."""
        return self

    async def __anext__(self) -> "pa.RecordBatch":
        """Return the next batch, which is never empty."""
        if self._lock.locked():
            # No waiting: the watermark of one task's batch would be stored with another task's.
            raise RuntimeError("another task waits for this reader's next batch: await it first")
        async with self._lock:
            return await self._read_next_batch()

    async def _read_next_batch(self) -> "pa.RecordBatch":
        """Read the next page and return it as a record batch, up to the horizon of this read.

        The horizon is the time before which every archived row is committed. The first call
        determines it. The position advances only after a successful read, so a failed call can be
        repeated.
        """
        if self.horizon is None:
            self.horizon = await self._store.run_read(
                lambda c: self._find(self._database, c.execution_options(no_parameters=True))
            )
        end = ArchivePosition(self.horizon.time)
        window = self._selection.between(MIN_TIME, end.time)
        while not self._is_last:
            # The database may read every body to measure its length. If that takes too long, the
            # next try reads fewer rows.
            max_rows, self._max_rows = self._max_rows, max(self._max_rows // 10, 1)
            page = await self._store.run_read(
                partial(
                    read_page,
                    self._database,
                    selection=window,
                    start=self._position,
                    limit=max_rows,
                )
            )
            if page is None:
                break
            batch = await self._convert(page) if page.rows else None
            self._max_rows = min(self._batch_rows, 2 * max(len(page.rows), 1))
            self._is_last = page.is_last
            self._position = page.end
            if batch is not None:
                return batch
        self._is_last = True
        self._position = max(self._position or end, end)
        raise StopAsyncIteration

    async def _convert(self, page: ArchivePage) -> "pa.RecordBatch":
        """Convert rows to Arrow in a thread; name the rows if a value does not fit the column."""
        from pyspark_sqlbroker.load.rows import to_batch  # noqa: PLC0415 - an extra

        try:
            # In a thread, because the conversion would block the event loop.
            return await asyncio.to_thread(to_batch, page.rows, self.schema)
        except (ValueError, OverflowError, TypeError) as error:  # base classes of pyarrow's errors
            raise StoreError(
                f"a row after {self._position or ArchivePosition(MIN_TIME)} up to {page.end} has a "
                f"value that its column cannot hold: {error}. Correct the row (with batch_rows=1, "
                f"the number after / is its id), or skip these rows with after={str(page.end)!r}"
            ) from error
