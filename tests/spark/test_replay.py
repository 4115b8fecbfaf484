"""Rows of the archive published again: each once for a job, whatever happens during it (M5)."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from faststream import AckPolicy
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import Connection, Table, event, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from typer.testing import CliRunner

from faststream_sqlbroker import SqlBroker, SqlBrokerMessage
from faststream_sqlbroker.cli.app import app
from faststream_sqlbroker.core.replays import ReplayCopy, ReplayPlan, copy_row
from faststream_sqlbroker.database.parts.policy_state import remove_expired
from faststream_sqlbroker.exceptions import PublishError, SetupError, StoreError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from pyspark_sqlbroker import ARCHIVE_SCHEMA, ReplayResult, read_archive, replay
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.replays import writer as replay_writer
from pyspark_sqlbroker.replays.writer import ReplayTask, ReplayWriter, split_batches
from tests.helpers import eventually
from tests.spark.conftest import START, Archive, archived
from tests.spark.frames import plain_frame

pytestmark = pytest.mark.capability("Spark: replay of archived messages, each once for a job")

ROOT = Path(__file__).parent.parent.parent


def messages(archive: Archive) -> list[Any]:
    """The live table's rows in the order of their ids."""
    with archive.engine.connect() as connection:
        return list(
            connection.execute(select(archive.message).order_by(archive.message.c.id)).all()
        )


def origins(archive: Archive) -> Counter[int]:
    return Counter(row.origin_id for row in messages(archive))


def marks(archive: Archive) -> list[Any]:
    return list(archive.execute("SELECT scope, expires_at FROM message_policy_state"))


def state_of(archive: Archive) -> Table:
    """The table of the marks."""
    return build_tables(
        SqlBrokerSchemaConfig(), dialect_name=archive.engine.dialect.name
    ).policy_state


def publish(df: DataFrame, archive: Archive, **options: Any) -> ReplayResult:
    """Replay, and write."""
    return replay(df, archive.url, dry_run=False, **{"num_partitions": 2, **options})


def frame(spark: SparkSession, archive: Archive, **options: Any) -> DataFrame:
    return read_archive(spark, archive.url, **options)


def test_a_replayed_row_is_a_new_message_that_says_where_it_comes_from(
    spark: SparkSession, archive: Archive
) -> None:
    """M5: payload, key, priority and headers are kept; what belongs to the old message is not."""
    archive.add(
        {
            "id": 41,
            "queue": "00123",
            "priority": -7,
            "key": "ключ",
            "dedup_id": "once",
            "headers": {
                "content-type": "application/json",
                "reply_to": "answers",
                "n": 1.5,
                "deep": {"a": [None]},
            },
            "payload": b"\xff\x00\x80not UTF-8",
            "state": "FAILED",
            "attempts_count": 10,
            "deliveries_count": 12,
            "publish_count": 3,
            "origin_id": 7,
            "expires_at": START,
            "last_error": "ValueError: no",
            "reason": "attempts",
        },
        {"id": 42, "queue": "other", "headers": None, "payload": b""},
    )
    done = replay(
        frame(spark, archive),
        archive.url,
        job="again",
        dry_run=False,
        headers={"reply_to": None, "why": "bug 7"},
    )
    assert (done.rows, done.queues, done.already, done.bytes) == (
        2,
        {"00123": 1, "other": 1},
        0,
        12,
    )
    rows = {row.origin_id: row for row in messages(archive)}
    row = rows[41]._mapping
    expected = {
        "queue": "00123",
        "priority": -7,
        "key": "ключ",
        "dedup_id": None,
        "payload": b"\xff\x00\x80not UTF-8",
        "state": "PENDING",
        "attempts_count": 0,
        "deliveries_count": 0,
        "publish_count": 4,
        "origin_id": 41,
        "expires_at": None,
        "first_attempt_at": None,
        "last_error": None,
        "policy_marks": 0,
        "headers": {
            "content-type": "application/json",
            "n": 1.5,
            "deep": {"a": [None]},
            "why": "bug 7",
            "replay-of": 41,
            "replay-job": "again",
        },
    }
    assert {name: row[name] for name in expected} == expected
    assert START < row["created_at"] == row["next_attempt_at"]
    assert rows[42].headers == {"why": "bug 7", "replay-of": 42, "replay-job": "again"}
    assert rows[42].payload == b""
    assert archive.count() == 2  # history stays
    state = state_of(archive)
    with archive.engine.connect() as connection:
        marks = connection.execute(select(state.c.expires_at, state.c.created_at)).all()
    assert [mark.expires_at - mark.created_at for mark in marks] == [timedelta(days=30)] * 2


def test_a_dry_run_says_what_would_happen_and_writes_nothing(
    spark: SparkSession, archive: Archive
) -> None:
    archive.add_many(30)
    df = frame(spark, archive)
    first = publish(df.where("id <= 10"), archive, job="j")
    assert (first.messages, first.dry_run) == (10, False)
    looked = replay(df, archive.url, job="j", num_partitions=2)
    assert looked.dry_run
    assert (looked.rows, looked.already, looked.messages) == (30, 10, 20)
    assert looked.queues == {"queue 0": 6, "queue 1": 7, "queue 2": 7}
    assert looked.bytes == 20 * 26
    assert [one["id"] for one in looked.sample] == list(range(11, 21))
    assert looked.sample[0]["headers"]["replay-of"] == 11
    assert len(messages(archive)) == len(marks(archive)) == 10
    # What was foretold comes true.
    done = publish(df, archive, job="j")
    assert (done.queues, done.already, done.bytes) == (looked.queues, looked.already, looked.bytes)


def test_a_repeated_job_publishes_nothing_twice_even_consumed_messages(
    spark: SparkSession, archive: Archive
) -> None:
    """M5: (job, id) is published once; another job publishes it once more."""
    archive.add_many(60)
    df = frame(spark, archive)
    twice = df.unionByName(df)
    assert publish(twice, archive, job="a", batch_size=7).messages == 60
    archive.execute("DELETE FROM message WHERE origin_id <= 20")  # consumed
    again = publish(df, archive, job="a")
    assert (again.rows, again.messages, again.already, again.queues) == (60, 0, 60, {})
    assert len(messages(archive)) == 40
    assert publish(df, archive, job="b").messages == 60
    assert origins(archive) == {n: 1 if n <= 20 else 2 for n in range(1, 61)}


def test_the_last_archived_row_of_an_id_counts(spark: SparkSession, new_database: Any) -> None:
    """A lake has a dead letter that was retried once for each time it was archived."""
    archive = new_database("sqlite")
    archive.add({"id": 1, "payload": b"old"})
    old = frame(spark, archive).localCheckpoint()
    archive.execute("UPDATE message_archive SET payload = 'new', archived_at = archived_at + 1")
    both = old.unionByName(frame(spark, archive)).unionByName(old)
    assert publish(both, archive, job="j").rows == 1
    assert [row.payload for row in messages(archive)] == [b"new"]


def test_a_payload_that_was_mended_may_be_text(spark: SparkSession, archive: Archive) -> None:
    """What to_json returns is published as its UTF-8."""
    archive.add({"id": 1}, {"id": 2})
    mended = frame(spark, archive).withColumn("payload", F.to_json(F.struct(F.lit("é").alias("a"))))
    assert publish(mended, archive, job="j").bytes == 2 * 10
    assert [row.payload for row in messages(archive)] == ['{"a":"é"}'.encode()] * 2


def test_two_runs_of_a_job_at_the_same_time_publish_each_row_once(
    spark: SparkSession, archive: Archive
) -> None:
    archive.add_many(300)
    df = frame(spark, archive)

    def run(number: int) -> int:
        return publish(
            df, archive, job="same", batch_size=5 + number, num_partitions=2 + number
        ).messages

    with ThreadPoolExecutor(2) as pool:
        published = list(pool.map(run, range(2)))
    assert origins(archive) == dict.fromkeys(range(1, 301), 1)
    assert sum(published) == 300


def writer_of(archive: Archive, **given: Any) -> ReplayWriter:
    """What a task of Spark gets."""
    nothing = timedelta(0)
    options: dict[str, Any] = {
        "database": get_database(parse_address(archive.url)),
        "config": SqlBrokerSchemaConfig(message_archive_table_name=None),
        "plan": ReplayPlan("j", None, {}),
        "run": "one run",
        "start": None,
        "spacing": nothing,
        "shift": nothing,
        "delay": nothing,
        "remember": None,
        "batch_size": 10,
        "dry_run": False,
    }
    return ReplayWriter(**options | given)


def rows_of(count: int) -> list[dict[str, Any]]:
    """What a task of Spark reads."""
    row = {
        "queue": "orders",
        "priority": 0,
        "key": None,
        "headers": None,
        "payload": b"1",
        "publish_count": 1,
    }
    return [{"id": n, "bytes": 1, **row} for n in range(1, count + 1)]


def test_a_task_that_fails_after_a_commit_and_is_repeated_counts_right(archive: Archive) -> None:
    """Spark repeats a task that was lost: what its first attempt has published is this run's."""

    def breaking() -> Iterator[dict[str, Any]]:
        yield from rows_of(25)[:21]
        raise RuntimeError("the worker is lost")

    writer = writer_of(archive)
    with pytest.raises(RuntimeError):
        ReplayTask(writer, 0).run(breaking())
    assert len(messages(archive)) == 20
    counts = ReplayTask(writer, 0).run(rows_of(25))
    assert (counts["orders"].rows, counts["orders"].fresh, counts["orders"].bytes) == (25, 25, 25)
    assert origins(archive) == dict.fromkeys(range(1, 26), 1)
    later = ReplayTask(writer_of(archive, run="another run"), 0).run(rows_of(25))
    assert (later["orders"].rows, later["orders"].fresh, later["orders"].bytes) == (25, 0, 0)


def test_speculative_tasks_at_the_same_time_publish_each_row_once(archive: Archive) -> None:
    writer = writer_of(archive, batch_size=3)
    rows = rows_of(60)
    with ThreadPoolExecutor(3) as pool:
        counts = list(pool.map(lambda _: ReplayTask(writer, 0).run(rows), range(3)))
    assert [count["orders"].fresh for count in counts] == [60] * 3  # Spark takes one of them
    assert origins(archive) == dict.fromkeys(range(1, 61), 1)


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_without_an_answer_is_repeated_and_writes_nothing_twice(
    archive: Archive, committed: bool
) -> None:
    task = ReplayTask(writer_of(archive, batch_size=4), 0)
    cut = []

    def lose(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement == "COMMIT" and len(cut) < 2:
            cut.append(statement)
            raise OperationalError(statement, None, ConnectionError("gone"))

    event.listen(
        task._engine, "after_cursor_execute" if committed else "before_cursor_execute", lose
    )
    counts = task.run(rows_of(10))
    assert len(cut) == 2
    assert counts["orders"].fresh == 10
    assert origins(archive) == dict.fromkeys(range(1, 11), 1)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_connection_that_the_server_ends_is_made_anew(archive: Archive) -> None:
    """In a batch, at its COMMIT, and while subscribers are woken: each batch is there once."""
    task = ReplayTask(writer_of(archive, batch_size=2), 0)
    moments = ["INSERT INTO message ", "COMMIT", "SELECT pg_notify"][
        : 3 if archive.kind == "postgresql" else 2
    ]
    ended = []

    def end(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if len(ended) < len(moments) and statement.startswith(moments[len(ended)]):
            ended.append(statement)
            kill(archive, connection)

    event.listen(task._engine, "before_cursor_execute", end)
    assert task.run(rows_of(10))["orders"].fresh == 10
    assert len(ended) == len(moments)
    assert origins(archive) == dict.fromkeys(range(1, 11), 1)


def test_a_database_that_ends_every_connection_is_given_up(
    new_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_writer, "RETRY_PAUSE", 0)
    archive = new_database("postgresql")
    task = ReplayTask(writer_of(archive), 0)

    def end(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO message "):
            kill(archive, connection)

    event.listen(task._engine, "before_cursor_execute", end)
    with pytest.raises(StoreError, match=r"^the database refused: "):
        task.run(rows_of(2))
    assert not messages(archive)


def kill(archive: Archive, connection: Connection) -> None:
    """Let the server end the connection of a task, as a restart or an administrator does."""
    raw: Any = connection.connection.driver_connection
    if archive.kind == "postgresql":
        # Waits until the process is gone.
        archive.execute(f"SELECT pg_terminate_backend({raw.info.backend_pid}, 60000)")
    else:
        archive.execute(f"KILL {raw.thread_id()}")


KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from sqlalchemy import event
from pyspark_sqlbroker.replays.writer import ReplayTask
writer, rows, moment, left = pickle.loads(Path(sys.argv[1]).read_bytes())
task = ReplayTask(writer, 0)

def die(_connection, _cursor, statement, *_):
    global left
    left -= statement == "COMMIT"
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

event.listen(task._engine, moment, die)
task.run(rows)
"""


def test_a_killed_worker_leaves_whole_batches_and_the_job_goes_on(
    archive: Archive, tmp_path: Path
) -> None:
    """M5: kill -9 half way, just before a COMMIT and just after one; then the job runs again."""
    for moment, commits, there in (
        ("before_cursor_execute", 10, 18),
        ("after_cursor_execute", 30, 60),
    ):
        given = tmp_path / moment
        given.write_bytes(
            pickle.dumps((writer_of(archive, batch_size=2), rows_of(200), moment, commits))
        )
        worker = subprocess.run(
            [sys.executable, "-c", KILLED, str(given)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            timeout=240,
        )
        assert worker.returncode == -signal.SIGKILL
        assert len(messages(archive)) == len(marks(archive)) == there
    done = ReplayTask(writer_of(archive, run="after the crash"), 0).run(rows_of(200))["orders"]
    assert (done.rows, done.fresh) == (200, 140)
    assert origins(archive) == dict.fromkeys(range(1, 201), 1)


async def test_failed_rows_are_kept_listed_and_replayed(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """M5: a broker's failures, read from its archive and from Parquet, are handled when the cause
    is mended."""
    broken = True
    handled = []
    engine = create_async_engine(archive.url)
    broker = SqlBroker(engine, logger=None)

    @broker.subscriber("orders", ack_policy=AckPolicy.REJECT_ON_ERROR, max_fetch_interval="50ms")
    async def handle(body: dict[str, int], message: SqlBrokerMessage) -> None:
        if broken and body["order"] % 2:
            raise ValueError(f"no stock for {body['order']}")
        handled.append(
            (body["order"], message.headers.get("replay-of"), message.headers.get("replay-job"))
        )

    async with broker:
        await broker.start()
        ids = [await broker.publish({"order": n}, "orders", key=str(n)) for n in range(10)]
        await eventually(lambda: archive.count() == 10)
        failed = frame(spark, archive, states=["failed"])
        assert {row.last_error.partition("\n")[0] for row in failed.collect()} == {
            f"ValueError: no stock for {n}" for n in range(1, 10, 2)
        }
        lake = str(tmp_path / "lake")
        failed.write.parquet(lake)
        broken = False
        handled.clear()
        # In a thread: the broker may have just locked SQLite's file, and its event loop must go on
        # to unlock it.
        done = await asyncio.to_thread(
            publish, spark.read.parquet(lake), archive, job="stock is back"
        )
        assert (done.messages, done.queues) == (5, {"orders": 5})
        await eventually(lambda: archive.count() == 15)
    await engine.dispose()
    assert sorted(handled) == [(n, ids[n], "stock is back") for n in range(1, 10, 2)]
    states = archive.execute(
        "SELECT state, publish_count, count(*) FROM message_archive GROUP BY 1, 2 ORDER BY 1, 2"
    )
    assert [tuple(row) for row in states] == [
        ("COMPLETED", 1, 5),
        ("COMPLETED", 2, 5),
        ("FAILED", 1, 5),
    ]
    assert not messages(archive)
    assert publish(failed, archive, job="stock is back").messages == 0


@pytest.mark.parametrize("first", ["spark", "here"])
async def test_a_row_is_replayed_once_for_a_name_whether_spark_or_the_database_does_it(
    spark: SparkSession, archive: Archive, first: str
) -> None:
    """Both leave the same marks: the second one publishes only what the first one has not."""
    archive.add_many(9)
    engine = create_async_engine(archive.url)
    admin = SqlBroker(engine, logger=None).admin

    async def by_spark(**options: Any) -> int:
        df = frame(spark, archive, **options)
        done = await asyncio.to_thread(publish, df, archive, job="bug 7")
        return done.messages

    async def here(**filters: Any) -> int:
        return (await admin.replay("bug 7", dry_run=False, **filters)).done

    if first == "spark":
        assert await by_spark(queues=["queue 0"]) == 3
        assert (await admin.replay("bug 7")).expected == 6
        assert await here() == 6
        assert await by_spark() == 0
    else:
        assert await here(queue="queue 1") == 3
        assert await by_spark() == 6
        assert await here() == 0
    assert origins(archive) == dict.fromkeys(range(1, 10), 1)
    assert len(marks(archive)) == 9 + (1 if first == "spark" else 2)  # and the jobs of the audit
    await engine.dispose()


def test_messages_become_due_at_a_rate_after_a_delay(spark: SparkSession, archive: Archive) -> None:
    archive.add_many(40)
    with archive.engine.connect() as connection:
        before = get_database(parse_address(archive.url)).get_time(connection)
    df = frame(spark, archive)
    publish(df, archive, job="slow", rate=10, delay="1h", num_partitions=2, batch_size=6)
    rows = messages(archive)
    due = sorted(row.next_attempt_at for row in rows)
    assert due[0] >= before + timedelta(hours=1)
    assert max(row.created_at for row in rows) < before + timedelta(minutes=30)
    for first in due:
        assert sum(1 for moment in due if first <= moment < first + timedelta(seconds=1)) <= 10
    assert timedelta(seconds=3.8) < due[-1] - due[0] < timedelta(seconds=8)
    # What other runs have published takes no slots of this one.
    more = df.unionByName(df.where("id <= 2").withColumn("id", F.col("id") + 100))
    publish(more, archive, job="slow", rate=10, num_partitions=1)
    late = [row.next_attempt_at for row in messages(archive)[40:]]
    assert late[1] - late[0] == timedelta(seconds=0.1)


def test_with_one_partition_the_order_is_kept(spark: SparkSession, new_database: Any) -> None:
    archive = new_database("postgresql")
    archive.add_many(50)
    df = frame(spark, archive).orderBy(F.rand(1))
    publish(df, archive, job="j", num_partitions=1, batch_size=7)
    assert [row.origin_id for row in messages(archive)] == list(range(1, 51))


def test_a_mark_lasts_as_long_as_it_was_asked_for(archive: Archive) -> None:
    """Subscribers remove expired marks; until then a row is not published again."""
    rows = rows_of(5)
    ReplayTask(writer_of(archive, remember=timedelta(hours=1)), 0).run(rows[:3])
    ReplayTask(writer_of(archive, remember=timedelta(milliseconds=1)), 0).run(rows[:4])
    ReplayTask(writer_of(archive), 0).run(rows)
    state = state_of(archive)
    columns = state.c.key, state.c.created_at, state.c.expires_at
    with archive.engine.begin() as connection:
        kept = {row.key: row for row in connection.execute(select(*columns))}
        assert {kept[n].expires_at - kept[n].created_at for n in "123"} == {timedelta(hours=1)}
        assert kept["4"].expires_at - kept["4"].created_at == timedelta(milliseconds=1)
        assert kept["5"].expires_at is None
        assert remove_expired(connection, state, 100) == 1
    ReplayTask(writer_of(archive), 0).run(rows)
    assert origins(archive) == {1: 1, 2: 1, 3: 1, 4: 2, 5: 1}


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_subscribers_on_postgresql_are_woken(spark: SparkSession, archive: Archive) -> None:
    archive.add_many(6)
    url = archive.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute("LISTEN sqlbroker_message")
        publish(frame(spark, archive), archive, job="later", delay=600)
        archive.execute("NOTIFY sqlbroker_message, 'later'")
        publish(frame(spark, archive), archive, job="j")
        archive.execute("NOTIFY sqlbroker_message, 'the end'")
        heard = []
        for one in listener.notifies(timeout=120):
            heard.append(one.payload)
            if one.payload == "the end":
                break
    # What is not due yet wakes none; two tasks may have a message of one queue each.
    assert (heard[0], heard[-1]) == ("later", "the end")
    assert set(heard[1:-1]) == {"queue 0", "queue 1", "queue 2"}


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("id", None, "no id"),
    ("queue", "", "row 9: its queue cannot be '': it must not be empty"),
    ("queue", None, "row 9: its queue cannot be None"),
    ("key", "x" * 256, "row 9: its key .* at most 255"),
    ("priority", 101, "row 9: its priority must be from -100 to 100, got 101"),
    ("priority", None, "row 9: its priority"),
    ("headers", '{"n": 1e999}', "row 9: its headers must be JSON values"),
    ("headers", '{"text": "\\u0000"}', "row 9: its headers must not contain a NUL"),
    ("headers", '{"\\ud800": 1}', "row 9: its headers must not contain .* a lone surrogate"),
    ("bytes", None, "row 9 has no payload"),
]


@pytest.mark.parametrize(("column", "value", "words"), BAD_VALUES)
def test_a_row_that_no_message_can_be_is_named(column: str, value: Any, words: str) -> None:
    [row] = rows_of(9)[8:]
    copy_row(row, ReplayPlan("j", None, {}))
    with pytest.raises(PublishError, match=words):
        copy_row({**row, column: value}, ReplayPlan("j", None, {}))


def test_a_replayed_copy_is_not_a_dead_letter() -> None:
    """In its new queue it would count as failed where the row has; the plan may give it such a
    header."""
    [row] = rows_of(1)
    row["headers"] = '{"dead-letter": {"queue": "orders"}, "a": null}'
    assert copy_row(row, ReplayPlan("j", "orders", {})).values["headers"] == {
        "a": None,
        "replay-of": 1,
        "replay-job": "j",
    }
    given = copy_row(row, ReplayPlan("j", None, {"dead-letter": 5})).values["headers"]
    assert given["dead-letter"] == 5


def test_a_row_that_cannot_be_published_leaves_whole_batches(archive: Archive) -> None:
    """The job goes on when the row is mended."""
    rows = rows_of(12)
    bad = [*rows[:8], {**rows[8], "priority": 101}, *rows[9:]]
    with pytest.raises(PublishError, match=r"^row 9: its priority"):
        ReplayTask(writer_of(archive, batch_size=2), 0).run(bad)
    assert origins(archive) == dict.fromkeys(range(1, 7), 1)
    ReplayTask(writer_of(archive, batch_size=2), 0).run(rows)
    assert origins(archive) == dict.fromkeys(range(1, 13), 1)


def test_an_error_of_a_task_is_shown_without_the_java_trace(
    spark: SparkSession, new_database: Any
) -> None:
    """A dry run finds rows that cannot be published too."""
    archive = new_database("sqlite")
    archive.add_many(2)
    bad = frame(spark, archive).withColumn("priority", F.lit(101))
    with pytest.raises(
        PublishError, match=r"^row 1: its priority .* got 101; .* run the same job again$"
    ):
        replay(bad, archive.url, job="j")
    archive.execute(
        "CREATE TRIGGER no BEFORE INSERT ON message BEGIN SELECT RAISE(FAIL, 'read only'); END"
    )
    with pytest.raises(
        StoreError, match=r"^the database refused: .*: read only; committed messages stay"
    ):
        publish(frame(spark, archive), archive, job="j")
    assert not messages(archive)
    assert not marks(archive)


HEADERS = {
    "from_json(headers, 'map<string, string>')": {"n": "1.5", "why": "é", "none": None},
    "from_json(headers, 'n double, why string, absent string')": {"n": 1.5, "why": "é"},
    "parse_json(headers)": {"n": 1.5, "why": "é", "none": None},
    "cast(headers AS binary)": {"n": 1.5, "why": "é", "none": None},
    "NULL": {},
}
"""What a user may have made of headers, and what is published."""


def test_headers_may_be_what_spark_makes_of_them(spark: SparkSession, new_database: Any) -> None:
    archive = new_database("sqlite")
    archive.add({"id": 1, "headers": {"n": 1.5, "why": "é", "none": None}})
    df = frame(spark, archive)
    for made, expected in HEADERS.items():
        done = replay(df.withColumn("headers", F.expr(made)), archive.url, job="j")
        [sample] = done.sample
        found = {
            name: value
            for name, value in sample["headers"].items()
            if not name.startswith("replay-")
        }
        assert found == expected, made


def test_options_that_cannot_be_are_refused(spark: SparkSession, new_database: Any) -> None:
    archive = new_database("sqlite")
    df = frame(spark, archive)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"job": ""}, "job cannot be ''"),
        ({"job": "x" * 256}, "job cannot be"),
        ({"queue": "a "}, "queue cannot be 'a '"),
        ({"headers": {"a": object()}}, "headers must be JSON"),
        ({"headers": {1: 1}}, "headers must have strings"),
        ({"headers": ["a"]}, r"headers must be JSON values by name, such as .*, got \['a'\]"),
        ({"headers": []}, r"headers must be JSON values by name"),
        ({"headers": {"a": "\x00"}}, "NUL"),
        ({"headers": {"a": "\ud800"}}, "surrogate"),
        ({"rate": 0}, "rate must be"),
        ({"rate": True}, "rate must be"),
        ({"delay": "soon"}, "delay cannot be 'soon'"),
        ({"remember": 0}, "remember must be longer"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"dry_run": 1}, "dry_run must be"),
        ({"table": "a b"}, "message_table_name must be"),
        ({"table": "nothing"}, "'nothing' cannot be read: create"),
    ]
    for options, words in wrong:
        with pytest.raises(SetupError, match=words):
            replay(df, archive.url, **{"job": "j", **options})
    with pytest.raises(SetupError, match="no column 'headers'"):
        replay(df.drop("headers"), archive.url, job="j")
    with pytest.raises(SetupError, match="payload must be binary or string, got int"):
        replay(df.withColumn("payload", F.lit(1)), archive.url, job="j")
    with pytest.raises(
        SetupError,
        match=r"headers must be a JSON object as a string.*, got array<string>: .*to_json",
    ):
        replay(df.withColumn("headers", F.array("queue")), archive.url, job="j")
    stream = spark.readStream.schema(ARCHIVE_SCHEMA).parquet(
        str(Path(archive.engine.url.database).parent)
    )
    with pytest.raises(SetupError, match="foreachBatch"):
        replay(stream, archive.url, job="j")
    fine = {"headers": {"smile": "\U0001f600", "text": "\\u0000"}}
    assert replay(df, archive.url, job="j", **fine).rows == 0


def test_a_password_appears_nowhere(spark: SparkSession) -> None:
    empty = plain_frame(spark, [], ARCHIVE_SCHEMA)
    with pytest.raises(StoreError) as failed:
        replay(empty, "postgresql+asyncpg://me:s3cret-word@127.0.0.1:1/x", job="j")
    assert "s3cret-word" not in str(failed.value) + repr(failed.value.__cause__)
    assert "s3cret-word" not in repr(
        parse_address("postgresql+asyncpg://me:s3cret-word@127.0.0.1:1/x")
    )


def test_batches_end_at_their_bytes_too() -> None:
    copies = [ReplayCopy(n, size, {}) for n, size in enumerate([1, 9, 30, 3, 3, 3, 3, 3])]
    found = [[copy.bytes for copy in batch] for batch in split_batches(copies, 3, 10)]
    assert found == [[1, 9], [30], [3, 3, 3], [3, 3]]


def test_large_payloads_arrive(archive: Archive) -> None:
    """Bytes that drivers must escape, in more transactions than one."""
    payload = bytes(range(256)) * 4096
    rows = [{**row, "payload": payload, "bytes": len(payload)} for row in rows_of(5)]
    assert ReplayTask(writer_of(archive), 0).run(rows)["orders"].bytes == 5 << 20
    assert [row.payload for row in messages(archive)] == [payload] * 5


def command(*arguments: str) -> Any:
    """The command line, on the session of the tests."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["archive", "replay", *arguments])


def test_the_command_shows_asks_and_publishes(
    spark: SparkSession, new_database: Any, tmp_path: Path
) -> None:
    """M5: dead letters are listed and sent again from a shell, from the table or an export."""
    archive = new_database("sqlite")
    archive.add(*({"id": n, "state": "FAILED" if n % 2 else "COMPLETED"} for n in range(1, 9)))
    archive.add(
        {"id": 9, "state": "FAILED", "archived_at": START + timedelta(days=1)}
        | {"queue": "o[bold]ther:email:", "key": "\x1b[2J\u202e:bug:"}
    )
    lake = str(tmp_path / "lake")
    frame(spark, archive).write.parquet(lake)
    chosen = ("--url", archive.url, "--job", "j", "--states", "failed", "--until", "2026-03-02")
    asked = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["archive", "replay", *chosen], input="n\n"
    )
    assert asked.exit_code == 1, asked.output
    assert "Publish 4 messages?" in asked.output
    assert not messages(archive)
    done = command(*chosen, "--path", lake, "--yes", "--into", "mended", "--header", "why=bug 7")
    assert done.exit_code == 0, done.output
    assert origins(archive) == dict.fromkeys((1, 3, 5, 7), 1)
    assert {(row.queue, row.headers["why"]) for row in messages(archive)} == {("mended", "bug 7")}
    again = command(*chosen, "--yes")
    assert "No rows to publish" in again.output
    only = command(
        "--url",
        archive.url,
        "--job",
        "j",
        "--id",
        "9",
        "--id",
        "1",
        "--since",
        "2026-03-02",
        "--yes",
    )
    assert "o[bold]ther:email:" in only.output
    assert "\ufffd[2J\ufffd:bug:" in only.output
    assert origins(archive) == dict.fromkeys((1, 3, 5, 7, 9), 1)


def test_messages_that_went_on_since_are_left_out_of_a_lake(
    spark: SparkSession, archive: Archive
) -> None:
    """The lake has five failures. Since then one was redriven and completed, one failed again, one
    was pruned, and one was redriven and waits."""
    # Ids that no copy gets: what a copy has in the live table is another message.
    archive.add(*({"id": n, "state": "FAILED"} for n in range(1001, 1006)))
    lake = frame(spark, archive).localCheckpoint()
    published_at = START - timedelta(seconds=1)
    again = {"archived_at": START + timedelta(days=1), "created_at": published_at}
    archive.execute("DELETE FROM message_archive WHERE id > 1001")
    archive.add({"id": 1002, **again}, {"id": 1003, "state": "FAILED", **again})
    waiting = archived(id=1005, headers=None, state="PENDING")
    columns = archive.message.c.keys()
    with archive.engine.begin() as connection:
        values = {name: value for name, value in waiting.items() if name in columns}
        connection.execute(archive.message.insert(), values)
    both = lake.unionByName(frame(spark, archive).where("id = 1003"))
    looked = replay(both, archive.url, job="j", current_only=True, num_partitions=2)
    assert (looked.rows, looked.redriven, looked.messages, looked.already) == (5, 2, 3, 0)
    done = publish(both, archive, job="j", current_only=True)
    assert (done.redriven, done.queues, done.already) == (2, {"orders": 3}, 0)
    copies = [row.origin_id for row in messages(archive) if row.origin_id is not None]
    assert sorted(copies) == [1001, 1003, 1004]  # what the database does not have counts as current
    again_done = publish(both, archive, job="j", current_only=True)
    assert (again_done.messages, again_done.redriven, again_done.already) == (0, 2, 3)
    everything = publish(both, archive, job="all")
    assert (everything.messages, everything.redriven) == (5, 0)
    without = publish(both, archive, job="live", current_only=True, archive_table=None)
    assert (without.messages, without.redriven) == (4, 1)


def test_two_messages_of_one_id_are_refused(spark: SparkSession, new_database: Any) -> None:
    """A lake has both if the database lost the first and gave its id again. Neither is left out
    unseen; each can be replayed as a job of its own."""
    archive = new_database("sqlite")
    archive.add({"id": 1001}, {"id": 1002})
    first = frame(spark, archive)
    other = first.where("id = 1002").withColumn(
        "created_at", F.col("created_at") + F.expr("INTERVAL 1 MICROSECOND")
    )
    both = first.unionByName(other)
    with pytest.raises(PublishError, match="row 1002: two messages have this id"):
        replay(both, archive.url, job="j")
    assert publish(first, archive, job="first").messages == 2
    assert publish(other, archive, job="other").messages == 1


def test_what_current_only_needs_is_checked(spark: SparkSession, new_database: Any) -> None:
    archive = new_database("sqlite")
    archive.add({"id": 1})
    data = frame(spark, archive)
    with pytest.raises(SetupError, match="current_only needs the column archived_at"):
        replay(data.drop("archived_at"), archive.url, job="j", current_only=True)
    with pytest.raises(SetupError, match="the table 'nowhere' cannot be read"):
        replay(data, archive.url, job="j", current_only=True, archive_table="nowhere")


def test_the_command_leaves_out_what_a_lake_knows_to_be_repaired(
    spark: SparkSession, new_database: Any, tmp_path: Path
) -> None:
    """Also where the later row is outside of the selection, and the database has no row left."""
    archive = new_database("sqlite")
    archive.add({"id": 1, "state": "FAILED"}, {"id": 2, "state": "FAILED"})
    first = frame(spark, archive).localCheckpoint()
    archive.execute("DELETE FROM message_archive")
    archive.add({"id": 2, "archived_at": START + timedelta(days=1)})
    lake = str(tmp_path / "lake")
    first.unionByName(frame(spark, archive)).write.parquet(lake)
    archive.execute("DELETE FROM message_archive")
    chosen = ("--url", archive.url, "--path", lake, "--states", "failed", "--until", "2026-03-02")
    assert command(*chosen, "--job", "j", "--yes").exit_code == 0
    assert origins(archive) == {1: 1}
    archive.add({"id": 1, "archived_at": START + timedelta(days=2)})
    shown = command(*chosen, "--job", "k", "--yes")
    assert "redriven or completed since, skipped" in shown.output
    assert "No rows to publish" in shown.output
    assert command(*chosen, "--job", "all", "--redriven", "--yes").exit_code == 0
    assert origins(archive) == {1: 2, 2: 1}


def test_the_command_refuses_impossible_options(spark: SparkSession, new_database: Any) -> None:
    archive = new_database("sqlite")
    for arguments, words in (
        (("--header", "x"), "--header must be name=value, got 'x'"),
        (("--states", "pending"), "states must contain only COMPLETED, FAILED, DISCARDED"),
        (("--since", "yesterday"), "since 'yesterday' is not an ISO 8601 time"),
    ):
        refused = command("--url", archive.url, "--job", "j", *arguments)
        assert isinstance(refused.exception, SetupError)
        assert words in str(refused.exception)
