"""Spark reads what the table holds: types, values and counts, on every database and in every time
zone."""

import asyncio
import os
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType
from sqlalchemy import event, make_url, select, text
from sqlalchemy.exc import ProgrammingError

from faststream_sqlbroker import NotSupportedError, Retention, SetupError, SqlBroker
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import StoreError
from pyspark_sqlbroker import (
    ARCHIVE_SCHEMA,
    MESSAGE_SCHEMA,
    open_snapshot,
    read_archive,
    read_messages,
)
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.databases.base import TableRange
from pyspark_sqlbroker.load.read import Snapshot
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows
from pyspark_sqlbroker.source.options import parse_options
from pyspark_sqlbroker.source.scan import BatchReader
from tests.conftest import Servers
from tests.helpers import eventually
from tests.spark.conftest import START, Archive
from tests.spark.frames import plain_frame

pytestmark = pytest.mark.capability("Spark: the archive and the live table by JDBC")
TIMES = [field.name for field in ARCHIVE_SCHEMA if field.dataType.typeName() == "timestamp"]
UTC = timezone.utc
SPRING = datetime(2026, 3, 8, 6, 30, tzinfo=UTC)
"""Half an hour before New York skips an hour."""

AUTUMN = datetime(2026, 11, 1, 4, 30, tzinfo=UTC)
"""Half an hour before New York's hour that comes twice begins; it ends two hours later."""

HOSTILE = "00123'\"\\`%:$?; DROP TABLE message; -- ö\u2028{}"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows by id, times as whole microseconds: Python's own conversion has a time zone of its
    own."""
    exact = frame.select(
        *(F.unix_micros(c).alias(c) if c in TIMES else F.col(c) for c in frame.columns)
    )
    rows = [row.asDict() for row in exact.collect()]
    for row in rows:
        row["payload"] = None if row.get("payload") is None else bytes(row["payload"])
    return sorted(rows, key=lambda row: row["id"])


def truth(archive: Archive, table: Any = None) -> list[dict[str, Any]]:
    """The table by SQLAlchemy, in the same form."""
    table = archive.archive if table is None else table
    with archive.engine.connect() as connection:
        rows = [
            dict(row._mapping) for row in connection.execute(select(table).order_by(table.c.id))
        ]
    for row in rows:
        for name, value in row.items():
            if isinstance(value, datetime):
                row[name] = (value - EPOCH) // timedelta(microseconds=1)
    return rows


def without_headers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "headers"} for row in rows]


def columns_of(schema: StructType) -> list[tuple[str, DataType, bool]]:
    """Names, types and nullability; Spark 4.0 adds notes of JDBC's to fields, 4.1 does not."""
    return [(field.name, field.dataType, field.nullable) for field in schema]


def fill(archive: Archive) -> None:
    """Rows that have broken readers: both changes of the clocks, bytes that are no text, NULLs,
    long ones."""
    steps = [timedelta(minutes=10 * n, microseconds=n * 111_111) for n in range(18)]
    rows = [{"archived_at": begin + step} for begin in (SPRING, AUTUMN) for step in steps]
    for number, row in enumerate(rows, 1):
        row |= {
            "id": number,
            "queue": (HOSTILE, "00123", "Orders", "orders")[number % 4],
            "payload": (b"\xff\xfe\x00not text\x80", b"", b'{"n": 1}', bytes(range(256)))[
                number % 4
            ],
            "headers": (None, {}, {"a": "ö\u2028'\"\\", "n": 1.5}, {"deep": {"list": [1, None]}})[
                number % 4
            ],
            "state": ("COMPLETED", "FAILED", "DISCARDED")[number % 3],
            "priority": (-100, 0, 100)[number % 3],
            "key": (None, HOSTILE, "")[number % 3],
            "last_error": (None, "ValueError: " + HOSTILE)[number % 2],
            "reason": (None, "superseded")[number % 2],
            "related_id": (None, 5)[number % 2],
            "error_fingerprint": (None, "0123456789abcdef")[number % 2],
            "hops": number % 3,
            "policy_key": (None, HOSTILE)[number % 2],
            "expires_at": (None, datetime(9999, 12, 30, 23, 59, 59, 999999, tzinfo=UTC))[
                number % 2
            ],
            "first_attempt_at": (None, row["archived_at"])[number % 2],
            "origin_id": (None, 2**62)[number % 2],
            "attempts_count": number * 1000,
        }
    archive.add(*rows)
    archive.add({"id": 2**63 - 1, "payload": bytes(range(256)) * 4096})


def test_every_column_of_every_row_is_the_tables(spark: SparkSession, archive: Archive) -> None:
    """D4: with Java in New York, over both changes of the clocks."""
    fill(archive)
    expected = truth(archive)
    for partitions in (1, 3):
        frame = read_archive(spark, archive.url, num_partitions=partitions)
        assert columns_of(frame.schema) == columns_of(ARCHIVE_SCHEMA)
        got = micros(frame)
        assert without_headers(got) == without_headers(expected)
        decoded = read_archive(spark, archive.url, num_partitions=partitions).select(
            "id", F.from_json("headers", "map<string,string>").alias("headers")
        )
        names = {row.id: row.headers for row in decoded.collect()}
        for row in expected:
            found = names[row["id"]]
            assert (found is None) == (row["headers"] is None), row
            assert found is None or set(found) == set(row["headers"])


FILTERS = (
    "state = 'FAILED'",
    "queue = '00123'",
    "queue LIKE '0%'",
    "queue = 'orders'",
    "key IS NULL",
    "key = ''",
    "id > 20 AND id <= 30",
    "attempts_count IN (1000, 5000)",
    "headers LIKE '%deep%'",
    "last_error IS NOT NULL AND priority = 100",
    "created_at IS NOT NULL AND payload = X''",
    (
        "archived_at >= timestamp'2026-11-01 05:30:00+00' "
        "AND archived_at < timestamp'2026-11-01 06:30:00+00'"
    ),
    (
        "archived_at > timestamp'2026-03-08 06:59:59+00' "
        "AND archived_at < timestamp'2026-03-08 07:31:00+00'"
    ),
)


def test_a_filter_pushed_and_a_filter_not_pushed_give_the_same_rows(
    spark: SparkSession, archive: Archive
) -> None:
    """And so do since and until, in the hour that comes twice as in any other."""
    fill(archive)
    frame = read_archive(spark, archive.url, num_partitions=2)
    kept = plain_frame(spark, frame.collect(), frame.schema).cache()
    for condition in FILTERS:
        pushed = {row.id for row in frame.filter(condition).select("id").collect()}
        plain = {row.id for row in kept.filter(condition).select("id").collect()}
        assert pushed == plain, condition
        assert plain, f"{condition} shows nothing"
    for begin in (SPRING, AUTUMN):
        for minutes in (0, 35, 61, 100):
            since = begin + timedelta(minutes=minutes)
            until = since + timedelta(minutes=50)
            read = read_archive(spark, archive.url, since=since, until=until, num_partitions=3)
            expected = {
                row["id"]
                for row in truth(archive)
                if since <= EPOCH + timedelta(microseconds=row["archived_at"]) < until
            }
            assert sorted(row.id for row in read.select("id").collect()) == sorted(expected) != []
    kept.unpersist()


def test_java_in_utc_pushes_times_down(spark: SparkSession, new_database: Any) -> None:
    """Where Spark would write the right literals it is let; elsewhere it filters itself."""
    archive = new_database("postgresql")
    fill(archive)
    condition = "archived_at >= timestamp'2026-11-01 05:30:00+00'"
    zones = spark._jvm.java.util.TimeZone
    before = zones.getDefault()
    assert before.getID() == "America/New_York"
    assert "GreaterThan" not in pushed_filters(read_archive(spark, archive.url).filter(condition))
    expected = read_archive(spark, archive.url).filter(condition).count()
    try:
        zones.setDefault(zones.getTimeZone("UTC"))
        frame = read_archive(spark, archive.url).filter(condition)
        assert "GreaterThanOrEqual(archived_at" in pushed_filters(frame)
        assert frame.count() == expected
    finally:
        zones.setDefault(before)


def pushed_filters(frame: DataFrame) -> str:
    plan = str(frame._jdf.queryExecution().executedPlan().toString())
    return plan[plan.index("PushedFilters") :]


def test_numbers_are_pushed_down_and_texts_are_not(spark: SparkSession, archive: Archive) -> None:
    archive.add_many(20)
    frame = read_archive(spark, archive.url)
    pushed = pushed_filters(frame.filter("id > 5 AND attempts_count IN (1, 2) AND queue LIKE 'q%'"))
    assert "GreaterThan(id,5)" in pushed
    assert "In(attempts_count" in pushed
    assert "queue" not in pushed.partition("ReadSchema")[0]


HOSTILE_TEXTS = (
    *(
        "a'b",
        "a\\b",
        "a\\'b",
        "a%b",
        "a_b",
        'a"b',
        "a\\",
        "\\",
        "' OR 1=1 -- ",
        "\\' OR 1=1 -- ",
        "a?b",
        "a:b",
    ),
    *("a'b ", "A'B", "ö\u2028", "a\nb", "$1", "{fn now()}"),
)


def test_no_text_can_break_out_of_a_filter(spark: SparkSession, archive: Archive) -> None:
    """Spark's own pushdown gives other rows for most of these: it escapes no backslash."""
    archive.add(*({"id": n, "queue": queue} for n, queue in enumerate(HOSTILE_TEXTS)))
    for queue in HOSTILE_TEXTS:
        only = read_archive(spark, archive.url, queues=[queue]).select("queue").collect()
        assert [row.queue for row in only] == [queue]
    frame = read_archive(spark, archive.url)
    column = F.col("queue")
    checks = {
        f"{n} {name}": condition
        for n, text in enumerate(HOSTILE_TEXTS)
        for name, condition in (
            ("eq", column == text),
            ("starts", column.startswith(text)),
            ("contains", column.contains(text)),
        )
    }
    for word in ("eq", "starts", "contains"):
        wanted = {name: c for name, c in checks.items() if name.endswith(word)}
        rows = [
            frame.filter(c).select(F.lit(name).alias("name"), "id") for name, c in wanted.items()
        ]
        union = rows[0]
        for one in rows[1:]:
            union = union.union(one)
        found = {(row.name.split()[0], row.id) for row in union.collect()}
        test = {"eq": str.__eq__, "starts": str.startswith, "contains": str.__contains__}[word]
        assert found == {
            (str(n), m)
            for n, text in enumerate(HOSTILE_TEXTS)
            for m, queue in enumerate(HOSTILE_TEXTS)
            if test(queue, text)
        }


def test_options_choose_rows(spark: SparkSession, archive: Archive) -> None:
    fill(archive)
    rows = truth(archive)
    read = read_archive(
        spark, archive.url, queues=[HOSTILE, "orders"], states=["failed", "DISCARDED"]
    )
    expected = [
        r["id"] for r in rows if r["queue"] in (HOSTILE, "orders") and r["state"] != "COMPLETED"
    ]
    assert sorted(row.id for row in read.select("id").collect()) == expected != []
    assert read_archive(spark, archive.url, queues=[]).count() == 0
    assert read_archive(spark, archive.url, until="2026-03-01").count() == 0


@pytest.mark.parametrize("column", ["id", "archived_at"])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 500])
def test_partitions_hold_every_row_once(
    spark: SparkSession, archive: Archive, count: int, column: str
) -> None:
    """With holes in the ids and times that are all the same, too."""
    for part, step in ((0, timedelta(0)), (1, timedelta(seconds=7))):
        if count:
            archive.add_many(count, first=1 + part * 10**12, step=step)
    archive.analyze()
    since = START - timedelta(days=1) if column == "archived_at" else None
    frame = read_archive(spark, archive.url, num_partitions=5, since=since)
    ids = [row.id for row in frame.select("id").collect()]
    assert len(ids) == len(set(ids)) == 2 * count


def test_partitions_are_of_about_the_same_size(spark: SparkSession, new_database: Any) -> None:
    """Nine tenths of the rows lie in a hundredth of the range of ids and times."""
    for kind in ("postgresql", "mariadb", "sqlite"):
        archive = new_database(kind)
        archive.add_many(1800, step=timedelta(seconds=1))
        archive.add_many(200, first=10**6, step=timedelta(hours=1))
        archive.analyze()
        for since in (None, START - timedelta(days=1)):
            frame = read_archive(spark, archive.url, num_partitions=4, since=since)
            sizes = [
                row["count"] for row in frame.groupBy(F.spark_partition_id()).count().collect()
            ]
            assert sum(sizes) == 2000
            assert len(sizes) >= 3, (kind, since, sizes)
            assert max(sizes) < 1200, (kind, since, sizes)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@pytest.mark.parametrize("minutes", [None, 5])
def test_few_rows_are_read_to_cut_the_times(
    new_database: Any, kind: str, minutes: int | None
) -> None:
    """Those of an index, not of the table, which each reader would wait for."""
    archive = new_database(kind)
    if kind == "postgresql":
        # Autovacuum would analyze the table, which then has a histogram.
        archive.execute("ALTER TABLE message_archive SET (autovacuum_enabled = false)")
    archive.add_many(3000)
    database = get_database(parse_address(archive.url))
    asked = []
    since = None if minutes is None else START + timedelta(minutes=minutes)
    times = select_rows(ARCHIVE, since=since).build_time_condition(database)
    with database.connect() as connection:
        event.listen(
            connection.engine, "before_cursor_execute", lambda *given: asked.append(given[2])
        )
        rows = TableRange("message_archive", None, "archived_at", times)
        database.build_predicates(connection, rows, 2)
        looks = [one for one in asked if "OFFSET" in one][:3]
        plans = [str(connection.exec_driver_sql(f"EXPLAIN {one}").all()) for one in looks]
    assert len(plans) == 3
    for plan in plans:  # PostgreSQL may rather sort a part of so few rows than skip a thousand
        uses = plan.count("Index Only Scan") if kind == "postgresql" else plan.count("Using index")
        assert uses >= (2 if kind == "postgresql" else 3), plan
        assert "filesort" not in plan


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_times_before_time_zones_are_exact(spark: SparkSession, archive: Archive) -> None:
    """Java's zone had local mean time then, which Spark takes into account by JDBC's calendar."""
    moments = [datetime(year, 6, 1, 12, tzinfo=timezone.utc) for year in (1700, 1883, 1899)]
    archive.add(*({"id": n, "archived_at": at} for n, at in enumerate(moments)))
    frame = read_archive(spark, archive.url).select(F.unix_micros("archived_at"))
    assert sorted(row[0] for row in frame.collect()) == [to_microseconds(at) for at in moments]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_few_rows_are_read_to_cut_the_ids(archive: Archive) -> None:
    """SQLite and InnoDB walk through the table itself; of old rows few are left, as a rule."""
    archive.add_many(2000, first=10**6)
    archive.add(*({"id": n * 1000} for n in range(400)))
    database = get_database(parse_address(archive.url))
    asked = []
    with database.connect() as connection:
        event.listen(
            connection.engine, "before_cursor_execute", lambda *given: asked.append(given[2])
        )
        cuts = database.build_predicates(connection, TableRange("message_archive", None, "id"), 12)
        skipped = re.findall(r"OFFSET (\d+)", " ".join(asked))
        assert sum(map(int, skipped)) < 10_000
        assert len(asked) < 100
        sizes = [
            database.fetch_scalar(connection, f"SELECT count(*) FROM message_archive WHERE {cut}")
            for cut in cuts
        ]
    assert (len(sizes), sum(sizes)) == (12, 2400)
    assert max(sizes) < 1.5 * 200


def test_a_small_table_is_read_by_one_connection_and_a_large_one_by_more(
    spark: SparkSession, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.add_many(100)
    archive.analyze()
    assert read_archive(spark, archive.url).rdd.getNumPartitions() == 1
    monkeypatch.setattr("pyspark_sqlbroker.databases.base.SMALL_TABLE_ROWS", 10)
    assert read_archive(spark, archive.url).rdd.getNumPartitions() == 2
    monkeypatch.setattr("pyspark_sqlbroker.databases.base.PARTITION_BYTES", 4096)
    monkeypatch.setattr("pyspark_sqlbroker.databases.base.MAX_AUTO_PARTITIONS", 6)
    assert read_archive(spark, archive.url).rdd.getNumPartitions() in (3, 4, 5, 6)


def test_the_live_table(spark: SparkSession, archive: Archive) -> None:
    rows = [
        {"queue": "orders", "payload": b"\xff", "state": "PENDING", "headers": {"a": 1}},
        {
            "queue": "00123",
            "payload": b"",
            "state": "PROCESSING",
            "lease_token": uuid4(),
            "lease_expires_at": AUTUMN,
        },
    ]
    with archive.engine.begin() as connection:
        for row in rows:
            connection.execute(archive.message.insert(), row)
    frame = read_messages(spark, archive.url)
    assert columns_of(frame.schema) == columns_of(MESSAGE_SCHEMA)
    hidden = {"lease_token", "policy_marks", "claimable", "headers"}
    expected = [
        {k: v for k, v in row.items() if k not in hidden} for row in truth(archive, archive.message)
    ]
    exact = frame.withColumn("lease_expires_at", F.unix_micros("lease_expires_at"))
    assert without_headers(micros(exact)) == expected
    assert read_messages(spark, archive.url, states=["processing"], queues=["00123"]).count() == 1
    with pytest.raises(SetupError, match="PENDING, PROCESSING, RETRYABLE"):
        read_messages(spark, archive.url, states=["completed"])


ASYNC = {"postgresql": "asyncpg", "sqlite": "aiosqlite"}


def disturb(archive: Archive, *, undone: str, redriven: str) -> None:
    """Redrive two keys, put one of them back, prune what is old, and rewrite the table."""
    url = make_url(archive.url)
    driver = f"{url.get_backend_name()}+{ASYNC.get(url.get_backend_name(), 'aiomysql')}"

    async def operate() -> None:
        async with SqlBroker(url.set(drivername=driver), logger=None) as broker:
            job = await broker.admin.redrive(queue="orders", key=undone, dry_run=False)
            assert (await broker.admin.undo(job.id)).done == job.done > 0
            assert (await broker.admin.redrive(queue="orders", key=redriven, dry_run=False)).done
            await broker.admin.prune(Retention(failed="3650d"))

    asyncio.run(operate())
    if archive.kind == "postgresql":
        with archive.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as own:
            own.exec_driver_sql("VACUUM FULL message_archive")


def test_no_message_comes_twice_and_none_is_lost_while_rows_move(
    spark: SparkSession, archive: Archive
) -> None:
    """D4: with more partitions than cores Spark reads one after another. In between, rows are
    redriven, put back, pruned and rewritten; by every reader those that nothing touches come once.
    """
    archive.add(
        *(
            {
                "id": n,
                "key": f"k{n % 9}",
                "payload": b"x" * 500,
                "state": "FAILED",
                "archived_at": START + timedelta(minutes=n) - timedelta(days=4000 * (n % 9 == 8)),
            }
            for n in range(1, 361)
        )
    )
    archive.analyze()
    closed = read_archive(spark, archive.url, num_partitions=3)
    open_end = read_archive(spark, archive.url, num_partitions=3, snapshot=False, since=START)
    options = parse_options({"url": archive.url, "numPartitions": "3"})
    source = BatchReader(options, StructType([ARCHIVE_SCHEMA["id"]]))
    cuts = source.partitions()
    assert (closed.rdd.getNumPartitions(), open_end.rdd.getNumPartitions(), len(cuts)) == (3, 3, 3)
    read: dict[str, list[int]] = {"closed": [], "open": [], "format": []}
    for part in range(3):
        for name, frame in (("closed", closed), ("open", open_end)):
            rows = frame.where(F.spark_partition_id() == part).select("id").collect()
            read[name] += [row.id for row in rows]
        for batch in source.read(cuts[part]):
            read["format"] += batch["id"].to_pylist()
        if part < 2:
            disturb(archive, undone=f"k{part}", redriven=f"k{part + 3}")
    with archive.engine.connect() as connection:
        late = select(archive.archive.c.id).where(
            archive.archive.c.archived_at > START + timedelta(days=1)
        )
        anew = set(connection.execute(late).scalars())
    for name, ids in read.items():
        assert len(ids) == len(set(ids)), name
        assert {n for n in range(1, 361) if n % 9 in (2, 5, 6, 7)} <= set(ids), name
        lacking = set(archive.ids()) - set(ids)
        assert lacking <= (set() if name == "open" else anew), name


def test_the_live_table_is_not_cut_by_blocks_that_rows_leave(
    spark: SparkSession, new_database: Any
) -> None:
    """A row that is claimed while it is read would be read by two connections, or by none."""
    archive = new_database("postgresql")
    rows = [{"queue": "orders", "payload": b"x" * 500} for _ in range(200)]
    with archive.engine.begin() as connection:
        connection.execute(archive.message.insert(), rows)
    archive.analyze()
    frame = read_messages(spark, archive.url, num_partitions=4)

    def spread() -> list[tuple[int, int]]:
        return [
            tuple(row)
            for row in frame.select(F.spark_partition_id().alias("p"), "id").orderBy("id").collect()
        ]

    before = spread()
    assert len({part for part, _ in before}) == 4
    archive.execute("UPDATE message SET priority = 1")  # every row has moved to another block
    assert spread() == before


@pytest.mark.capability("Spark: one snapshot for all connections of a load")
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_one_snapshot_over_all_partitions(spark: SparkSession, archive: Archive) -> None:
    """Rows deleted and added in both tables change nothing until the context ends."""
    archive.add_many(300)
    with open_snapshot(archive.url) as snapshot:
        frame = read_archive(spark, archive.url, snapshot=snapshot, num_partitions=3)
        waiting = read_messages(spark, archive.url, snapshot=snapshot)
        archive.execute("DELETE FROM message_archive WHERE id % 3 = 0")
        archive.add_many(10, first=1000)
        with archive.engine.begin() as connection:
            connection.execute(archive.message.insert(), {"queue": "orders", "payload": b""})
        assert frame.count() == 300
        assert {row.id for row in frame.select("id").collect()} == set(range(1, 301))
        assert waiting.count() == 0
        assert (
            snapshot.connection.exec_driver_sql("SELECT count(*) FROM message_archive").scalar()
            == 300
        )
    assert read_archive(spark, archive.url, num_partitions=3).count() == 210
    with pytest.raises(Exception, match="snapshot"):
        frame.count()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_snapshot_is_not_held_for_ever(archive: Archive) -> None:
    """The server ends it, as it holds up vacuum."""
    holders = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND state = 'idle in transaction'"
    )
    with open_snapshot(archive.url, max_duration="1m") as snapshot:
        limit = "idle_in_transaction_session_timeout"
        assert snapshot.connection.exec_driver_sql(f"SHOW {limit}").scalar() == "1min"
        assert archive.execute(holders).scalar() == 1
        snapshot.connection.exec_driver_sql(f"SET {limit} = '1ms'")
        await eventually(lambda: archive.execute(holders).scalar() == 0)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_reading_an_ended_snapshot_raises(spark: SparkSession, archive: Archive) -> None:
    """By Spark and by the snapshot's own connection; other errors in the block are unchanged."""

    def fail(read: Callable[[Snapshot], Any]) -> None:
        with open_snapshot(archive.url, max_duration="1m") as snapshot:
            pid = snapshot.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
            archive.execute(f"SELECT pg_terminate_backend({pid}, 60000)")  # returns when it is gone
            read(snapshot)

    reads: list[Callable[[Snapshot], Any]] = [
        lambda snapshot: read_archive(spark, archive.url, snapshot=snapshot).count(),
        lambda snapshot: snapshot.connection.exec_driver_sql("SELECT 1"),
    ]
    for read in reads:
        with pytest.raises(
            StoreError, match=r'the server ended the snapshot, .* 60 s: .*window="hour"'
        ):
            fail(read)
    with pytest.raises(ZeroDivisionError):
        fail(lambda _snapshot: 1 / 0)
    with pytest.raises(ProgrammingError), open_snapshot(archive.url) as held:
        held.connection.exec_driver_sql("SELECT nothing")


@pytest.mark.parametrize("database", ["sqlite", "mariadb"], indirect=True)
def test_other_databases_have_no_shared_snapshot(archive: Archive) -> None:
    with pytest.raises(NotSupportedError, match="closed windows"), open_snapshot(archive.url):
        pass


@pytest.mark.parametrize("wrong", ["yes", None, 1, open_snapshot("postgresql://127.0.0.1:1/none")])
def test_an_invalid_snapshot_is_refused(wrong: Any) -> None:
    """Also one whose `with` was forgotten: everything would be read without it."""
    spark: Any = None
    for read in (read_archive, read_messages):
        with pytest.raises(SetupError, match=r"with open_snapshot\(url\) as now:`, got "):
            read(spark, "postgresql://127.0.0.1:1/none", snapshot=wrong)


@pytest.mark.parametrize("number", [2, "auto"])
def test_a_missing_table_is_named(spark: SparkSession, archive: Archive, number: Any) -> None:
    for options, words in (
        ({"table": "typo"}, "there is no table 'typo' in the database"),
        (
            {"schema": "nowhere"},
            "there is no table 'message_archive' in the database .*, schema 'nowhere'",
        ),
    ):
        with pytest.raises(SetupError, match=words):
            read_archive(spark, archive.url, num_partitions=number, **options)


def test_a_dataframe_is_closed_at_the_databases_clock(
    spark: SparkSession, archive: Archive
) -> None:
    """What is archived after it was made does not appear in a later action, unless that is asked
    for."""
    archive.add({"id": 1})
    closed = read_archive(spark, archive.url)
    open_ = read_archive(spark, archive.url, snapshot=False)
    archive.add({"id": 2, "archived_at": datetime(2999, 1, 1, tzinfo=UTC)})
    assert (closed.count(), open_.count()) == (1, 2)


@pytest.mark.parametrize(("kind", "mark"), [("postgresql", '"'), ("mariadb", "`")])
def test_a_database_whose_name_urls_encode(
    spark: SparkSession, servers: Servers, kind: str, mark: str
) -> None:
    admin = servers.admin(kind)
    name = f"my shöp%20+{os.getpid()}"
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {mark}{name}{mark}"))
    archive = Archive(admin.url.set(database=name).render_as_string(hide_password=False))
    try:
        archive.add_many(3)
        assert read_archive(spark, archive.url).count() == 3
    finally:
        archive.engine.dispose()
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE {mark}{name}{mark}"))


def test_a_mebibyte_does_not_fill_the_memory(spark: SparkSession, archive: Archive) -> None:
    """Rows are fetched by bytes: 120 MiB in payloads of one pass through Java's memory a few at a
    time."""
    body = bytes(range(256)) * 4096
    for first in range(1, 121, 10):
        archive.add(*({"id": first + n, "payload": body} for n in range(10)))
    archive.analyze()
    frame = read_archive(spark, archive.url, num_partitions=2)
    assert frame.agg(F.sum(F.length("payload")), F.countDistinct(F.md5("payload"))).first()[:] == (
        120 << 20,
        1,
    )
