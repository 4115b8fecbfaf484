"""`broker.archive.read`: every row of the archive once, however late its transaction commits."""

import asyncio
import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import event, insert, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

import pyspark_sqlbroker.horizon
from faststream_sqlbroker import (
    MissingExtraError,
    SetupError,
    SqlBroker,
    StoreError,
    TransientStoreError,
)
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.types import clock
from pyspark_sqlbroker.load import archive_pages
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS
from tests.faststream.conftest import Look, Make
from tests.helpers import bytes_in_a_statement, eventually

pytestmark = pytest.mark.capability(
    "the archive as Arrow batches: no row behind a slow transaction is lost"
)

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
sqlite_only = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


def archived(number: int, **given: Any) -> dict[str, Any]:
    at = given.get("archived_at", START)
    times = dict.fromkeys(("created_at", "next_attempt_at", "archived_at"), at)
    return {
        "id": number,
        "queue": "orders",
        "payload": b"x",
        "state": "COMPLETED",
        **times,
        **given,
    }


async def put(look: Look, *rows: dict[str, Any]) -> None:
    async with look.engine.begin() as connection:
        for row in rows:
            await connection.execute(insert(look.tables.archive).values(row))


async def settle(look: Look, connection: AsyncConnection, number: int) -> None:
    """Archive as the broker does: a statement that is not the first takes the database's clock."""
    table = look.tables.archive
    await connection.execute(insert(table).values(archived(number)))
    await connection.execute(update(table).where(table.c.id == number).values(archived_at=clock()))


class Reads:
    """One read after another, with what survives a process: the watermark, as JSON."""

    def __init__(self, broker: SqlBroker, **options: Any) -> None:
        self.broker = broker
        self.options = {"margin": 0, **options}
        self.kept = "null"
        self.ids: Counter[int] = Counter()

    async def next(self) -> list[int]:
        """The ids of the next; nothing is left for the margin, as all statements have ended."""
        reader = self.broker.archive.read(after=json.loads(self.kept), **self.options)
        ids = [number async for batch in reader for number in batch.column("id").to_pylist()]
        self.kept = json.dumps(reader.watermark)
        self.ids.update(ids)
        return ids

    async def until(self, wanted: Sequence[int]) -> None:
        """Read until all have come; a server's other databases may hold the horizon up."""

        async def there() -> bool:
            await self.next()
            return set(wanted) <= set(self.ids)

        await eventually(there)


async def test_a_row_behind_a_slow_transaction_comes_once(
    broker: SqlBroker, look: Look, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading by the greatest id, or the latest time, would lose it."""
    monkeypatch.setattr(pyspark_sqlbroker.horizon, "MAX_LOCK_WAIT", 0.01)
    reads = Reads(broker)
    async with look.engine.connect() as slow:
        async with look.engine.begin() as connection:
            await settle(look, connection, 10)
        await reads.until([10])
        # At once: for a tenth of a second InnoDB's list of transactions is that of the read before,
        # which the same session has made.
        await settle(look, slow, 11)
        assert await reads.next() == []
        if database != "sqlite":  # whose writers take turns
            async with look.engine.begin() as quick:
                await settle(look, quick, 5)
            assert await reads.next() == []
        await slow.commit()
    late = [11] if database == "sqlite" else [11, 5]
    await reads.until(late)
    assert reads.ids == dict.fromkeys([10, *late], 1)


async def test_batches_have_all_that_the_table_has_and_can_be_gone_on_from(
    broker: SqlBroker, look: Look
) -> None:
    """A process that dies between two batches goes on from its watermark; nothing is held there."""
    # Four rows of a moment, three of a batch: watermarks lie between rows of one moment, too.
    moments = [START + timedelta(microseconds=n // 4) for n in range(13)]
    odd: dict[int, dict[str, Any]] = {
        3: {"key": "a 'quoted' \\ %s name", "headers": {"a": "ü🎉", "n": [1, None]}},
        4: {"payload": b"\xff\x00\x80", "last_error": "E: é\n🎉", "origin_id": 2**62},
        5: {"queue": "schön 50%", "priority": -100, "expires_at": START, "reason": "why"},
    }
    rows = [
        archived(100 - n, archived_at=moment, **odd.get(n, {})) for n, moment in enumerate(moments)
    ]
    await put(look, *rows)
    order = sorted(rows, key=lambda row: (row["archived_at"], row["id"]))
    seen = []
    watermark = None
    for _ in range(5):
        reader = broker.archive.read(after=watermark, batch_rows=3, margin=0)
        assert reader.watermark == watermark
        batch = await anext(reader)
        assert broker.engine.pool.checkedout() == 0
        assert batch.schema == reader.schema
        watermark = json.loads(json.dumps(reader.watermark))
        seen += batch.to_pylist()
    assert [row["id"] for row in seen] == [row["id"] for row in order]
    assert await Reads(broker).next() == [row["id"] for row in order]
    stored = {row["id"]: row for row in await look.rows(archive=True)}
    for row in seen:
        expected = {field.name: stored[row["id"]][field.name] for field in ARCHIVE_FIELDS}
        row["headers"] = row["headers"] and json.loads(row["headers"])
        for field in ARCHIVE_FIELDS:
            if field.type == "timestamp" and expected[field.name] is not None:
                expected[field.name] = to_microseconds(expected[field.name])
                row[field.name] = to_microseconds(row[field.name])
        assert row == expected


async def test_a_batch_is_bounded_in_bytes_and_filters_are_the_databases(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_pages, "BATCH_BYTES", 2_000)
    sizes = [700, 700, 700, 9_000, 700, 1]
    await put(
        look,
        *(archived(n, payload=b"x" * size) for n, size in enumerate(sizes, 1)),
        archived(7, queue="Orders"),
        archived(8, state="FAILED", queue="others"),
    )
    reader = broker.archive.read(queues=["orders"], states=["completed"], margin=0)
    batches = [batch.column("id").to_pylist() async for batch in reader]
    assert [number for batch in batches for number in batch] == [1, 2, 3, 4, 5, 6]
    assert batches[0] in ([1, 2], [1, 2, 3])
    assert 4 in (batches[1][-1], batches[1][0])
    assert await Reads(broker, states="failed").next() == [8]
    assert await Reads(broker, queues="Orders").next() == [7]
    assert await Reads(broker, queues=[]).next() == []
    # At its end a watermark is where the horizon was, and a read after it begins there.
    assert reader.horizon is not None
    assert reader.watermark == reader.horizon.time.isoformat(timespec="microseconds")


@pytest.mark.parametrize("database", ["sqlite", "mariadb", "mysql"], indirect=True)
async def test_few_lengths_are_asked_for_where_bodies_are_long(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MySQL and MariaDB read a body whole for its length: by each batch, those of all rows."""
    monkeypatch.setattr(archive_pages, "BATCH_BYTES", 2_000)
    # Another program has put text there, which has more bytes than characters.
    bodies: list[Any] = [b"x" * 700, "ü" * 350, "\0" * 700] * 40
    await put(look, *(archived(n) for n in range(len(bodies))))
    async with look.engine.begin() as connection:
        for n, body in enumerate(bodies):
            change = text("UPDATE message_archive SET payload = :body WHERE id = :id")
            await connection.execute(change, {"body": body, "id": n})
    lengths = 0

    @event.listens_for(broker.engine.sync_engine, "before_cursor_execute")
    def count(*arguments: Any) -> None:
        nonlocal lengths
        limit = re.search(r"LIMIT (\d+)$", arguments[2])
        lengths += int(limit[1]) if limit else 0

    reader = broker.archive.read(margin=0)
    batches = [batch.column("id").to_pylist() async for batch in reader]
    assert [number for batch in batches for number in batch] == list(range(len(bodies)))
    assert {len(batch) for batch in batches} <= {2, 3}
    assert lengths <= 10 + 2 * len(bodies) + 6


async def test_a_read_that_is_cancelled_or_loses_its_connection(
    broker: SqlBroker, look: Look, database: str
) -> None:
    """Nothing is sent on a connection that has ended, which would hide how it ended."""
    await put(look, archived(1))
    engine = broker.engine.sync_engine
    marks = ["information_schema.innodb_trx"]
    kill = "KILL CONNECTION_ID()"
    if database == "postgresql":
        marks = ["pg_stat_activity"]
        kill = "SELECT pg_terminate_backend(pg_backend_pid())"
    elif database == "sqlite":
        marks = ["BEGIN IMMEDIATE", "PRAGMA user_version ="]

    async def read() -> list[int]:
        reader = broker.archive.read(margin=0)
        return [number async for batch in reader for number in batch.column("id").to_pylist()]

    def cancel(*arguments: Any) -> None:
        if marks[0] in arguments[2]:
            task.cancel()

    event.listen(engine, "before_cursor_execute", cancel)
    task = asyncio.create_task(read())
    await asyncio.wait([task])
    assert task.cancelled()
    event.remove(engine, "before_cursor_execute", cancel)
    for mark in marks:
        lost: list[str] = []

        def lose(
            cursor: Any, statement: str, _: Any, mark: str = mark, lost: list[str] = lost
        ) -> bool:
            if mark not in statement or lost:
                return False
            lost.append(statement)
            if database == "sqlite":  # as the driver says it
                raise sqlite3.ProgrammingError("Cannot operate on a closed database.")
            cursor.execute(kill)
            return True

        event.listen(engine, "do_execute_no_params", lose)
        assert await read() == [1]
        assert lost
        event.remove(engine, "do_execute_no_params", lose)


@sqlite_only
async def test_the_lag_is_used_before_the_time_of_a_statement_is_over(
    make: Make, look: Look
) -> None:
    broker = make(statement_timeout=1.0)
    await broker.create_tables()
    await put(look, archived(1))
    reader = broker.archive.read()

    async def first() -> Any:
        try:
            return await anext(reader)
        except TransientStoreError:  # the machine stands still
            return None

    async with look.engine.connect() as writer:
        await settle(look, writer, 2)
        assert (await eventually(first)).column("id").to_pylist() == [1]
    assert reader.horizon is not None
    assert reader.horizon.source == "safety lag"


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_bytes_in_a_statement_fail_no_read(
    broker: SqlBroker, look: Look, database: str
) -> None:
    """MySQL lists no statements until it ends: what they may write comes later."""
    reads = Reads(broker)
    async with look.engine.begin() as connection:
        await settle(look, connection, 1)
    async with bytes_in_a_statement(look.engine):
        reader = broker.archive.read(margin=0)
        ids = [number async for batch in reader for number in batch.column("id").to_pylist()]
    assert reader.horizon is not None
    if database == "mysql":
        assert (reader.horizon.source, ids) == ("safety lag", [])
        assert reader.horizon.detail.startswith("MySQL lists no statements while ")
    else:
        assert reader.horizon.source == "transactions"
    await reads.until([1])


@sqlite_only
async def test_only_one_task_may_wait_for_a_batch(broker: SqlBroker, look: Look) -> None:
    await put(look, archived(1), archived(2))
    reader = broker.archive.read(batch_rows=1)
    batch, refused = await asyncio.gather(anext(reader), anext(reader), return_exceptions=True)
    assert isinstance(refused, RuntimeError)
    assert not isinstance(batch, BaseException)
    assert batch.column("id").to_pylist() == [1]
    assert (await anext(reader)).column("id").to_pylist() == [2]


@sqlite_only
async def test_a_row_that_no_batch_can_hold_is_named(broker: SqlBroker, look: Look) -> None:
    """Other programs may put anything into SQLite's columns."""
    await put(look, *(archived(n) for n in range(1, 7)))
    async with look.engine.begin() as connection:
        for number, change in (
            (1, "archived_at = -99999999999999999"),
            (3, "attempts_count = 'many'"),
            (4, "archived_at = archived_at + 0.5"),
            (5, "archived_at = archived_at + 2, priority = 1 << 40"),
            (6, "archived_at = archived_at + 3"),
        ):
            where = f" WHERE id = {number}"
            await connection.execute(text(f"UPDATE message_archive SET {change}{where}"))
    reader = broker.archive.read(batch_rows=1)
    assert (await anext(reader)).column("id").to_pylist() == [2]
    for number, following in ((3, 4), (5, 6)):
        with pytest.raises(StoreError, match=rf"after='\S+/{number}'") as error:
            await anext(reader)
        assert reader.watermark is not None
        assert f"a row after {reader.watermark} up to" in str(error.value)
        after = re.findall(r"after='(.*)'", str(error.value))
        reader = broker.archive.read(after=after[0], batch_rows=1)
        assert (await anext(reader)).column("id").to_pylist() == [following]


@sqlite_only
async def test_what_cannot_be_read_is_refused(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for after in ("yesterday", "2026-03-01T00:00:00+00:00/x", datetime(2026, 3, 1), 7):
        with pytest.raises(SetupError, match="after"):
            broker.archive.read(after=after)
    with pytest.raises(SetupError, match="batch_rows must be a whole number"):
        broker.archive.read(batch_rows=0)
    with pytest.raises(SetupError, match=r"states must contain only .*, got 'PENDING'"):
        broker.archive.read(states=["PENDING"])
    schema = SqlBrokerSchemaConfig(message_archive_table_name=None)
    with pytest.raises(SetupError, match="no archive table to read"):
        SqlBroker("sqlite+aiosqlite:///none.db", schema=schema).archive.read()
    # A watermark of the future stays: nothing is read a second time.
    reader = broker.archive.read(after="9000-01-01")
    assert [batch async for batch in reader] == []
    assert reader.watermark == "9000-01-01T00:00:00.000000+00:00"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyspark_sqlbroker.load.rows")
    with pytest.raises(MissingExtraError, match=r"pip install 'sqlbroker\[arrow\]'"):
        broker.archive.read()
