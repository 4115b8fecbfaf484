"""`broker.archive`: what was archived as Arrow's record batches, each row once. Extra `arrow`."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Self

from sqlalchemy.util import await_only

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError, StoreError
from pyspark_sqlbroker.address import KINDS, Address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.horizon import Horizon, find_horizon
from pyspark_sqlbroker.load.archive_pages import Page, Position, parse_position, read_page
from pyspark_sqlbroker.load.selection import ARCHIVE, Selection, select_rows
from pyspark_sqlbroker.moments import FIRST, Moment

if TYPE_CHECKING:
    import pyarrow as pa

    from faststream_sqlbroker.database.store import Store

BATCH_ROWS = 10_000
"""Most rows of a batch, where the caller does not say."""

FIRST_ROWS = 100
"""Rows whose lengths the first batch is chosen from, as long as the size of bodies is unknown."""


class Archive:
    """What is read of the archive; it needs the database, but no started broker."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def read(
        self,
        after: Moment | None = None,
        *,
        queues: Iterable[str] | None = None,
        states: Iterable[str | MessageState] | None = None,
        decode: bool = False,
        batch_rows: int = BATCH_ROWS,
        safety_lag: Duration = "5m",
        margin: Duration = "2s",
    ) -> "ArchiveReader":
        """Read what was archived after a watermark, in the order of `archived_at`.

            reader = broker.archive.read(after=watermark)
            async for batch in reader:
                ...
            watermark = reader.watermark

        Over successive reads, each after the watermark of the one before, every row of the archive
        comes exactly once: also rows whose transaction commits late, and messages that were retried
        for days and have an old id. To this end a read ends at the horizon, before which no row can
        appear any more; the rest comes with the next read. A message that is redriven and ends
        again has a new row.

        Each batch is read in a transaction of its own, bounded by `statement_timeout`. Between two
        batches nothing is held: neither a connection nor a snapshot, so a slow reader pins no
        vacuum. Rows that are deleted before their batch is read do not come.

        Args:
            after: The `watermark` of an earlier reader, or a moment: rows archived before it are
                left out. None begins with the oldest row.
            queues: Only these queues. A watermark counts for the queues and states it was read by.
            states: Only these states.
            decode: Add a column `body`, a string: the body as JSON text, by the rules of
                `decode_payload`, where a text is a JSON string, and what is neither JSON nor text
                by its content type is NULL.
            batch_rows: Most rows of a batch; it also ends with the row that reaches 8 MiB. The
                first has 100 at most, each later one at most twice as many as the one before.
            safety_lag: How long a transaction may last at most where transactions cannot be seen:
                on PostgreSQL without `pg_read_all_stats`, on MySQL and MariaDB without PROCESS, and
                with the other causes that `find_horizon` names. Rows of this time come later.
            margin: How long a server takes at most from a statement's start until the statement can
                be seen.

        Raises:
            SetupError: an argument cannot be, or there is no archive.
            MissingExtraError: pyarrow is not installed.
        """
        try:
            from pyspark_sqlbroker.load.rows import to_schema  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            if error.name != "pyarrow":
                raise
            msg = "'pyarrow' is not installed: pip install 'sqlbroker[arrow]'"
            raise MissingExtraError(msg) from error
        table = self._store.tables.archive
        if table is None:
            raise SetupError("there is no archive to read (message_archive_table_name=None)")
        url = self._store.engine.url
        selection = select_rows(ARCHIVE, table.name, table.schema, queues=queues, states=states)
        return ArchiveReader(
            self._store,
            Address(KINDS[self._store.dialect_name], "", {}, url),
            selection,
            parse_position("after", after),
            whole_number("batch_rows", batch_rows),
            partial(
                find_horizon,
                safety_lag=seconds_or_zero("safety_lag", safety_lag),
                margin=seconds_or_zero("margin", margin),
                # Where the answer is held up, the safety lag is used before the time is over.
                patience=self._store.statement_timeout / 2,
                sleep=lambda seconds: await_only(asyncio.sleep(seconds)),
            ),
            to_schema(selection.fields, decoded=decode),
        )


class ArchiveReader:
    """One read of the archive: an asynchronous iterator of Arrow's record batches.

    An error ends no read: ask for the next batch again, or go on with a reader from the watermark.

    Raises (from the iteration):
        RuntimeError: another task waits for the next batch of this reader.
        TransientStoreError: the database could not be reached or was busy; try again.
        StoreError: the database refused the statement; or a row has a value that its column's type
            does not allow.

    Attributes:
        schema: Arrow's schema of every batch, the columns and types of Spark's `ARCHIVE_SCHEMA`:
            `payload` is binary, times are microseconds in UTC.
        horizon: Where the read ends and how that is known, a `Horizon`; None before the first
            batch was asked for.
    """

    def __init__(
        self,
        store: "Store",
        address: Address,
        selection: Selection,
        start: Position | None,
        batch_rows: int,
        find: Callable[..., Horizon],
        schema: "pa.Schema",
    ) -> None:
        self._store = store
        self._database = database_of(address)
        self._selection = selection
        self._position = start
        self._batch_rows = batch_rows
        self._most = min(batch_rows, FIRST_ROWS)
        self._find = find
        self._is_last = False
        self._lock = asyncio.Lock()
        self.schema = schema
        self.horizon: Horizon | None = None

    @property
    def watermark(self) -> str | None:
        """Up to where rows have been handed out, as text: what the next read begins after.

        Store it when the batches before are stored, or together with them: after each batch, or
        once at the end. None if nothing has been read from the beginning on.
        """
        return None if self._position is None else str(self._position)

    def __aiter__(self) -> Self:
        """This reader: a second loop goes on where the first was left."""
        return self

    async def __anext__(self) -> "pa.RecordBatch":
        """The next batch; it holds one row at least."""
        if self._lock.locked():
            # Not a queue: the watermark of one task's batch would be stored with another's.
            raise RuntimeError("another task waits for this reader's next batch: await it first")
        async with self._lock:
            return await self._next()

    async def _next(self) -> "pa.RecordBatch":
        if self.horizon is None:
            self.horizon = await self._store.read(
                lambda c: self._find(self._database, c.execution_options(no_parameters=True))
            )
        end = Position(self.horizon.moment)
        window = self._selection.between(FIRST, end.moment)
        while not self._is_last:
            # The database may read every body whose length is asked for. If that takes too long,
            # the next try is with fewer.
            most, self._most = self._most, max(self._most // 10, 1)
            page = await self._store.read(
                partial(
                    read_page, self._database, selection=window, start=self._position, most=most
                )
            )
            if page is None:
                break
            batch = await self._convert(page) if page.rows else None
            self._most = min(self._batch_rows, 2 * max(len(page.rows), 1))
            self._is_last = page.is_last
            self._position = page.end
            if batch is not None:
                return batch
        self._is_last = True
        self._position = max(self._position or end, end)
        raise StopAsyncIteration

    async def _convert(self, page: Page) -> "pa.RecordBatch":
        from pyspark_sqlbroker.load.rows import to_batch  # noqa: PLC0415 - an extra

        try:
            # In a thread: the event loop would stand still for as long as that takes.
            return await asyncio.to_thread(to_batch, page.rows, self.schema)
        except (ValueError, OverflowError, TypeError) as error:  # pyarrow's own are of these
            raise StoreError(
                f"a row behind {self._position or Position(FIRST)} up to {page.end} has a value "
                f"that its column cannot have: {error}. Correct it (batch_rows=1 makes the number "
                f"behind / its id), or leave these rows out: after={str(page.end)!r}"
            ) from error
