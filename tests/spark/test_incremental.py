"""Incremental loads: every row once, despite late commits and crashes."""

import itertools
import json
import logging
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from sqlalchemy import func, make_url, select

from faststream_sqlbroker.exceptions import ConcurrentLoadError, NotSupportedError, SetupError
from pyspark_sqlbroker import Load, new_rows
from pyspark_sqlbroker.horizon import Horizon, find_horizon
from pyspark_sqlbroker.load import incremental
from pyspark_sqlbroker.source import stream
from tests.helpers import eventually
from tests.spark.conftest import START, Archive
from tests.spark.horizons import archived_at, settle
from tests.spark.test_stream import Query, latest

pytestmark = pytest.mark.capability("Spark: incremental loads that lose no row")

servers_only = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
sqlite_only = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


WINDOWS = 8
"""That have rows, of loads and of a stream, while others write."""
LATE = 7
"""Id of a row whose transaction ends after others that began later."""


class Loads:
    """A series of loads of one archive."""

    def __init__(self, spark: SparkSession, archive: Archive, path: Path) -> None:
        self.spark = spark
        self.archive = archive
        self.path = path

    def open(self, **options: Any) -> Any:
        """The next one; nothing is left for the margin, as all statements have ended."""
        given = {"margin": 0, "num_partitions": 1, **options}
        return new_rows(self.spark, self.archive.url, state=str(self.path), **given)

    def next(self, **options: Any) -> list[int]:
        """The ids of the next one."""
        with self.open(**options) as load:
            return ids(load)

    @property
    def state(self) -> dict[str, Any]:
        """What is kept."""
        content: dict[str, Any] = json.loads(self.path.read_text())
        return content


@pytest.fixture
def loads(spark: SparkSession, archive: Archive, tmp_path: Path) -> Loads:
    return Loads(spark, archive, tmp_path / "state" / "orders.json")


def ids(load: Load) -> list[int]:
    return sorted(row.id for row in load.frame.select("id").collect())


def test_windows_follow_each_other(loads: Loads, caplog: pytest.LogCaptureFixture) -> None:
    """D4: each begins where the last ended; one line in the log says where, and by what."""
    loads.archive.add_many(20)
    seen = []
    windows = []
    with caplog.at_level(logging.INFO, "faststream_sqlbroker.spark"):
        for _ in range(4):
            with loads.open(max_window="8s") as load:
                seen.append(ids(load))
                windows.append((load.since, load.until, load.name))
    assert seen == [[*range(1, 9)], [*range(9, 17)], [*range(17, 21)], []]
    moments = [START + timedelta(seconds=8 * n) for n in range(5)]
    assert [window[:2] for window in windows] == [
        (None, moments[1]),
        *itertools.pairwise(moments[1:]),
    ]
    assert windows[0][2] == "since=start"
    assert windows[1][2] == "since=20260301T000008.000000Z"
    assert len(caplog.records) == 4
    line = caplog.records[1].getMessage()
    assert (
        "from 2026-03-01T00:00:08+00:00 until 2026-03-01T00:00:16+00:00; horizon by transactions: "
        in line
    )
    assert loads.state["until"] == "2026-03-01T00:00:32+00:00"
    assert [path.name for path in loads.path.parent.iterdir()] == ["orders.json"]
    password = make_url(loads.archive.url).password
    assert password is None or str(password) not in loads.path.read_text() + caplog.text


async def test_both_wrong_ways_lose_rows(loads: Loads) -> None:
    """D4: by the highest id, and by the latest archived_at, rows are lost for ever; here they are
    not."""
    archive = loads.archive
    columns = loads.archive.archive.c
    with archive.engine.begin() as connection:
        settle(archive, connection, 10)
    loaded = Counter(await until_loaded(loads, {10}))
    with archive.engine.connect() as reader, archive.engine.connect() as slow:
        last_id, last_at = reader.execute(
            select(func.max(columns.id), func.max(columns.archived_at))
        ).one()
        late = {5} if archive.kind == "sqlite" else {5, 11}
        if archive.kind != "sqlite":  # whose writers take turns
            settle(archive, slow, 11)
            slow_row_held = loads.next()
            assert slow_row_held == []
        with archive.engine.begin() as quick:
            settle(archive, quick, 5)  # retried for days
        reader.rollback()
        by_id = set(reader.execute(select(columns.id).where(columns.id > last_id)).scalars())
        found = reader.execute(
            select(columns.id, columns.archived_at).where(columns.archived_at > last_at)
        ).all()
        by_time = {row.id for row in found}
        last_at = max(row.archived_at for row in found)
        slow.commit()
        reader.rollback()
        by_id |= set(reader.execute(select(columns.id).where(columns.id > last_id)).scalars())
        by_time |= set(
            reader.execute(select(columns.id).where(columns.archived_at > last_at)).scalars()
        )
    assert 5 not in by_id
    assert 11 not in by_time
    loaded += Counter(await until_loaded(loads, late))
    assert loaded == dict.fromkeys({10, *late}, 1)


async def until_loaded(loads: Loads, wanted: set[int]) -> list[int]:
    """Load until all are there; MariaDB's horizon waits for statements in other databases too."""
    found: list[int] = []

    def look() -> bool:
        found.extend(loads.next())
        return wanted <= set(found)

    await eventually(look)
    return found


def test_a_load_that_fails_is_repeated_as_it_was(
    loads: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    """D4: the watermark stays, and the same window comes again, whatever was archived since."""
    loads.archive.add_many(5)
    with pytest.raises(RuntimeError, match="disk full"), loads.open() as first:
        assert ids(first) == [1, 2, 3, 4, 5]
        raise RuntimeError("disk full")
    assert loads.state["until"] is None
    loads.archive.add(
        {"id": 6, "archived_at": first.until - timedelta(microseconds=1)},
        {"id": 7, "archived_at": first.until},
    )
    with caplog.at_level(logging.INFO, "faststream_sqlbroker.spark"), loads.open() as again:
        assert (again.since, again.until, again.name) == (first.since, first.until, first.name)
        # 6 is no row that the database's clock could have given.
        assert ids(again) == [
            1,
            2,
            3,
            4,
            5,
            6,
        ]
    assert "again, because its last load did not finish" in caplog.text
    with pytest.raises(KeyboardInterrupt), loads.open():
        raise KeyboardInterrupt
    with loads.open(max_window=0.01) as shorter:  # where the whole was too much
        assert shorter.until == first.until + timedelta(seconds=0.01)
        assert ids(shorter) == [7]


def test_one_of_two_loads_at_the_same_time_fails(loads: Loads) -> None:
    """D4: the one that began first; the other's end is the state's."""
    loads.archive.add_many(3)
    with (
        pytest.raises(
            ConcurrentLoadError,
            match=r"changed .*orders\.json.*, except folders that both loads wrote to",
        ),
        loads.open() as first,
    ):
        assert ids(first) == [1, 2, 3]
        with loads.open() as second:
            assert ids(second) == [1, 2, 3]
        state = loads.state
    assert loads.state == state
    assert state["until"] == second.until.isoformat()
    assert loads.next() == []


@sqlite_only
def test_a_load_whose_state_was_removed_while_it_ran(loads: Loads) -> None:
    with pytest.raises(ConcurrentLoadError), loads.open():
        loads.path.unlink()
    assert not loads.path.exists()


def test_the_state_of_other_rows_is_refused(loads: Loads, tmp_path: Path) -> None:
    loads.archive.add_many(6)
    assert loads.next(queues=["queue 1"]) == [2, 5]
    assert loads.next(queues=("queue 1", "queue 1")) == []
    before = loads.path.read_bytes()
    for other, words in (
        ({}, r"its queues is \['queue 1'\], but None was requested"),
        (
            {"queues": ["queue 1"], "states": ["failed"]},
            r"its states is None, but \['FAILED'\] was requested",
        ),
        (
            {"queues": ["queue 1"], "source": "the shop"},
            "its database is '.*', but 'the shop' was requested",
        ),
        ({"queues": ["queue 1"], "table": "old_archive"}, "its table is 'message_archive'"),
    ):
        with pytest.raises(SetupError, match=words), loads.open(**other):
            pytest.fail("the block must not run")
    assert loads.path.read_bytes() == before
    named = Loads(loads.spark, loads.archive, tmp_path / "named.json")
    assert named.next(source="the shop") == [1, 2, 3, 4, 5, 6]
    assert str(make_url(loads.archive.url).database) not in named.path.read_text()


@sqlite_only
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "is not a JSON object"),
        (
            '{"format": 1, "sour',
            "is not a JSON object: restore it from a copy, or give another path if it belongs",
        ),
        ("{}", "is not a watermark file of this version"),
        ('{"format": 2, "source": {}}', "is not a watermark file of this version"),
    ],
)
def test_a_file_that_is_not_a_state_is_refused(loads: Loads, content: str, words: str) -> None:
    loads.path.parent.mkdir()
    loads.path.write_text(content)
    with pytest.raises(SetupError, match=words), loads.open():
        pytest.fail("the block must not run")
    assert loads.path.read_text() == content


@sqlite_only
def test_a_folder_in_place_of_the_state_is_refused(loads: Loads) -> None:
    loads.path.mkdir(parents=True)
    with pytest.raises(SetupError, match="exists but cannot be read"), loads.open():
        pytest.fail("the block must not run")


@sqlite_only
def test_a_damaged_state(loads: Loads) -> None:
    loads.archive.add_many(1)
    loads.next()
    for name in ("until", "load", "begun"):
        content = loads.state
        kept = dict(content)
        del content[name]
        loads.path.write_text(json.dumps(content))
        with pytest.raises(SetupError, match=r"the watermark file .* is damaged"), loads.open():
            pytest.fail("the block must not run")
        loads.path.write_text(json.dumps(kept))
    assert loads.next() == []


def test_where_the_first_load_begins(loads: Loads) -> None:
    assert loads.next() == []  # an empty table
    loads.path.unlink()
    loads.archive.add_many(10)
    assert loads.next(since=START + timedelta(seconds=6)) == [7, 8, 9, 10]
    assert loads.next(since=START) == []  # it goes on where the last ended
    loads.path.unlink()
    with pytest.raises(RuntimeError), loads.open(since=START + timedelta(seconds=8)):
        raise RuntimeError
    assert loads.next(since="2100-01-01") == [9, 10]  # the first load has begun
    loads.path.unlink()
    with loads.open(since="2100-01-01") as load:
        assert (load.since, ids(load)) == (load.until, [])
    assert not loads.path.exists()


@pytest.mark.parametrize("since", [START + timedelta(seconds=6), "2100-01-01"])
def test_a_first_load_that_fails_is_repeated_whatever_since_is_then(
    loads: Loads, since: Any
) -> None:
    """Its folder would stay next to another's, with the same rows, or nothing would ever be read
    again."""
    loads.archive.add_many(10)
    with pytest.raises(RuntimeError), loads.open() as first:
        raise RuntimeError
    with loads.open(since=since) as again:
        assert (again.name, again.until) == (first.name, first.until)
        assert ids(again) == [*range(1, 11)]
    assert loads.state["until"] == first.until.isoformat()


def test_a_load_is_repeated_by_a_server_that_is_behind(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: what is not there yet is left for the next load, also where that is the whole window."""
    loads.archive.add_many(10)

    def fail() -> Load:
        with pytest.raises(RuntimeError), loads.open() as failed:
            raise RuntimeError
        return failed  # type: ignore[no-any-return]

    def repeat(failed: Load, horizon: datetime) -> tuple[datetime, list[int]]:
        behind = Horizon(horizon, "safety lag", "it has replayed no more")
        with monkeypatch.context() as patched:
            patched.setattr(incremental, "find_horizon", lambda *_, **__: behind)
            with loads.open() as load:
                assert (load.name, load.horizon) == (failed.name, behind)
                return load.until, ids(load)

    half = START + timedelta(seconds=5)
    assert repeat(fail(), half) == (half, [1, 2, 3, 4, 5])
    assert repeat(fail(), START) == (half, [])
    assert (loads.state["until"], loads.state["begun"]) == (half.isoformat(), None)
    assert loads.next() == [6, 7, 8, 9, 10]


def test_the_longest_window_begins_with_the_oldest_row_that_is_asked_for(loads: Loads) -> None:
    loads.archive.add_many(20)
    rows: dict[str, Any] = {"queues": ["queue 2"], "max_window": "2s"}
    assert [loads.next(**rows) for _ in range(3)] == [[3], [6], []]


@postgresql_only
def test_a_snapshot_keeps_rows_deleted_during_the_load(loads: Loads) -> None:
    loads.archive.add_many(10)
    with loads.open(snapshot=True, num_partitions=2) as load:
        loads.archive.execute("DELETE FROM message_archive WHERE id <= 5")
        assert ids(load) == [*range(1, 11)]


@postgresql_only
def test_a_first_load_while_the_table_is_rewritten(loads: Loads) -> None:
    """D4: rows move to other blocks between two partitions, and each still comes once."""
    archive = loads.archive
    archive.add(*({"id": n, "payload": b"x" * 500} for n in range(1, 201)))
    with loads.open(num_partitions=4) as load:

        def spread() -> dict[int, int]:
            rows = load.frame.select("id", F.spark_partition_id().alias("part")).collect()
            assert len({row.id for row in rows}) == len(rows)
            return {row.id: row.part for row in rows}

        before = spread()
        archive.execute("DELETE FROM message_archive WHERE id <= 100")
        with archive.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM FULL message_archive")
        after = spread()
    assert len(set(before.values())) == 4
    assert after == {number: part for number, part in before.items() if number > 100}


@pytest.mark.parametrize("database", ["sqlite", "mariadb"], indirect=True)
def test_only_postgresql_shares_snapshots(loads: Loads) -> None:
    with (
        pytest.raises(NotSupportedError, match="no snapshot that connections share"),
        loads.open(snapshot=True),
    ):
        pytest.fail("the block must not run")
    assert not loads.path.exists()


LOADER = """
import sys
from pyspark_sqlbroker import build_session, new_rows
spark = build_session(databases=["postgresql"], master="local[1]")
url, state, lake = sys.argv[1:]
with new_rows(spark, url, state=state, margin=0) as load:
    load.frame.write.mode("overwrite").parquet(f"{lake}/{load.name}")
    sys.stdout.write("written\\n")
    sys.stdout.flush()
    sys.stdin.readline()
"""


@postgresql_only
def test_a_loader_killed_between_its_data_and_its_state(loads: Loads, tmp_path: Path) -> None:
    """M5: kill -9; the restarted load replaces what the killed one wrote."""
    lake = tmp_path / "lake"
    loads.archive.add_many(5)
    command = [sys.executable, "-c", LOADER, loads.archive.url, str(loads.path), str(lake)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert "written\n" in iter(process.stdout.readline, "")
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert loads.state["until"] is None
    with loads.archive.engine.begin() as connection:
        settle(loads.archive, connection, 6)
    for _ in range(2):
        with loads.open() as load:
            load.frame.write.mode("overwrite").parquet(f"{lake}/{load.name}")
    stored = loads.spark.read.parquet(str(lake)).select("id").collect()
    assert sorted(row.id for row in stored) == [1, 2, 3, 4, 5, 6]


@contextmanager
def writing(archive: Archive) -> Iterator[None]:
    """A process that archives with slow and overlapping transactions."""
    url = archive.engine.url.render_as_string(hide_password=False)
    command = [sys.executable, "-m", "tests.spark.late_writer", url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            yield
            process.communicate("stop\n", timeout=120)
            assert process.returncode == 0
        finally:
            process.kill()


@contextmanager
def streaming(archive: Archive) -> Iterator[tuple[Query, "Future[None]"]]:
    """A stream that asks for rows again and again, as Spark does, at the same time as the block;
    done when it fails."""
    query = Query(archive)
    ended = Event()

    def work() -> None:
        while not ended.wait(0.05):
            query.trigger()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            yield query, done
        finally:
            ended.set()
    done.result()


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_many_loads_and_a_stream_during_writes(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: the union of the loads is the table, and no row comes twice; by the latest time seen a
    row is lost."""
    archive = loads.archive
    monkeypatch.setattr(stream, "find_horizon", partial(find_horizon, margin=0))
    if archive.kind == "sqlite":
        archive.execute("PRAGMA journal_mode=WAL")
    loaded: Counter[int] = Counter()
    full = 0
    with writing(archive):
        with streaming(archive) as (query, done):
            while not done.done() and min(full, len(query.windows)) < WINDOWS:
                found = loads.next()
                full += bool(found)
                loaded.update(found)
        if archive.kind != "sqlite":  # whose writers take turns
            loaded.update(await past_a_late_commit(loads, query))
    with archive.engine.connect() as reader:
        table = set(reader.execute(select(archive.archive.c.id)).scalars())
    assert archive.kind == "sqlite" or LATE in table
    loaded.update(await until_loaded(loads, table - set(loaded)))
    assert loaded == dict.fromkeys(table, 1)
    await eventually(lambda: not query.trigger() and len(query.rows) >= len(table))
    assert query.rows == sorted(table)


async def past_a_late_commit(loads: Loads, query: Query) -> list[int]:
    """The ids of a load, and a window of the stream, after rows that were archived later than
    `LATE` and before that is committed; by their time it is never seen."""
    archive = loads.archive
    columns = archive.archive.c
    with archive.engine.connect() as slow:
        settle(archive, slow, LATE)
        at = archived_at(archive, slow, LATE)
        await eventually(lambda: latest(archive) > at)
        seen = latest(archive)
        found = loads.next()
        query.trigger()
        slow.commit()
    with archive.engine.connect() as reader:
        later = select(columns.id).where(columns.archived_at > seen)
        by_time = set(reader.execute(later).scalars())
    assert LATE not in {*by_time, *found, *query.rows}
    return found
