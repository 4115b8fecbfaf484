"""`spark.readStream.format("sqlbroker")`: each archived row exactly once, despite late commits."""

import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import streaming as spark_streaming
from pyspark.sql.streaming import StreamingQuery
from sqlalchemy import func, make_url, select

from faststream_sqlbroker.exceptions import NotSupportedError, SetupError, StoreError
from pyspark_sqlbroker import ARCHIVE_SCHEMA, prune_archive
from pyspark_sqlbroker.horizon import find_horizon
from pyspark_sqlbroker.source import stream
from pyspark_sqlbroker.source.options import parse_options
from pyspark_sqlbroker.source.stream import (
    LIMITS_VERSION,
    StreamReader,
    from_offset,
    get_spark_version,
    make_stream_reader,
    to_offset,
)
from tests.helpers import eventually
from tests.spark.conftest import START, Archive
from tests.spark.horizons import find, settle

pytestmark = pytest.mark.capability(
    'Spark: `spark.readStream.format("sqlbroker")`, each row exactly once'
)

DAY = timedelta(days=1)
LATE = "connect back"
"""Spark's words when the Python of a source does not answer within ten seconds, which no setting
changes."""
SECRET = "se@s/am %&=?#'\\x"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of this process leave no time for a statement to be seen, as `settle` needs none."""
    monkeypatch.setattr(stream, "find_horizon", partial(find_horizon, margin=0))


class Query:
    """What Spark 4.0 and 4.1 do with a reader, without Spark: many windows in little time."""

    def __init__(self, archive: Archive, **options: str) -> None:
        self.options = parse_options({"url": archive.url, **options}, streaming=True)
        self.offset: dict[str, str] | None = None
        self.windows: list[list[int]] = []
        self.restart()

    def restart(self) -> None:
        """A new process: Spark tells it the checkpoint's offset by an empty window."""
        self.reader = StreamReader(self.options, ARCHIVE_SCHEMA)
        if self.offset is not None:
            assert self.reader.partitions(self.offset, self.offset) == []

    def trigger(self, *, twice: bool = False) -> bool:
        """One micro-batch, or none if there is nothing new; `twice`: it is repeated later, by a new
        process."""
        end = self.reader.latestOffset()
        start = self.offset or self.reader.initialOffset()
        if end == start:
            return False
        rows = self.read(start, end)
        if twice:
            self.offset = end
            self.restart()
            assert self.read(start, end) == rows
        self.windows.append(rows)
        self.offset = end
        return True

    def read(self, start: dict[str, str], end: dict[str, str]) -> list[int]:
        cuts = self.reader.partitions(start, end)
        batches = [batch for cut in cuts for batch in self.reader.read(cut)]
        return sorted(itertools.chain.from_iterable(batch["id"].to_pylist() for batch in batches))

    @property
    def rows(self) -> list[int]:
        return sorted(itertools.chain.from_iterable(self.windows))


@contextmanager
def writing(archive: Archive, rows: int) -> Iterator[threading.Event]:
    """Transactions that overlap, archive by the database's clock, and commit in another order; set
    when done."""
    numbers = iter(range(1, rows + 1))
    done = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        while batch := list(itertools.islice(numbers, chance.randrange(1, 4))):
            with archive.engine.begin() as connection:
                for number in batch:
                    settle(archive, connection, number)
                    time.sleep(chance.random() * 0.02)
                time.sleep(chance.random() ** 4 * 0.5)
            time.sleep(0.01)

    # SQLite has one writer at a time.
    threads = [
        threading.Thread(target=write, args=(n,))
        for n in range(1 if archive.kind == "sqlite" else 6)
    ]
    for thread in threads:
        thread.start()
    watcher = threading.Thread(target=lambda: ([thread.join() for thread in threads], done.set()))
    watcher.start()
    yield done
    watcher.join()


async def test_late_commits_are_read_exactly_once(archive: Archive, soon: None) -> None:
    """D4: over 50 windows with restarts and repeated windows, during transactions that overlap."""
    # MariaDB's horizon takes a tenth of a second, SQLite's writers take turns: fewer there.
    rows, windows = {"postgresql": (120, 50), "sqlite": (24, 8)}.get(archive.kind, (60, 25))
    query = Query(archive, maxRowsPerTrigger="2")
    chance = random.Random(1)
    with writing(archive, rows) as done:
        while not done.is_set():
            query.trigger(twice=chance.random() < 0.2)
            if chance.random() < 0.2:
                query.restart()
    await eventually(lambda: not query.trigger() and len(query.rows) >= rows, timeout=120)
    assert query.rows == list(range(1, rows + 1))
    assert len(query.windows) >= windows


def start(
    spark: SparkSession, archive: Archive, folder: Path, *, trigger: dict[str, Any], **options: Any
) -> StreamingQuery:
    reader = spark.readStream.format("sqlbroker").options(**{"url": archive.url} | options)
    writer = (
        reader.schema("id long, queue string, archived_at timestamp")
        .load()
        .writeStream.format("parquet")
    )
    return (
        writer.option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(**trigger)
        .start(f"{folder}/rows")
    )


async def started(
    spark: SparkSession, archive: Archive, folder: Path, **more: Any
) -> StreamingQuery:
    """A query that has ended its first batch, or has failed; the third one that is late has."""
    for _ in range(3):
        query = start(spark, archive, folder, **more)
        await eventually(lambda: query.recentProgress or not query.isActive, timeout=200)
        if LATE not in str(query.exception()):
            break
    return query


def ids(spark: SparkSession, folder: Path) -> list[int]:
    return sorted(row.id for row in spark.read.parquet(f"{folder}/rows").select("id").collect())


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_a_stopped_stream_goes_on_where_it_was(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """D4, D5: stopped while rows are written, it goes on under the same limit; each row is
    there once."""
    archive.add_many(16, first=1001)
    every = {"processingTime": "0 seconds"}
    with writing(archive, 20 if archive.kind != "sqlite" else 12) as done:
        query = await started(spark, archive, tmp_path, trigger=every, maxRowsPerTrigger=7)
        try:
            offsets = tmp_path / "checkpoint" / "offsets"
            await eventually(
                lambda: len(list(offsets.glob("[0-9]*"))) > 3 or not query.isActive, timeout=200
            )
            assert query.exception() is None
        finally:
            query.stop()
        await eventually(done.is_set)
    stopped_at = len(list(offsets.glob("[0-9]*")))
    with archive.engine.begin() as connection:
        for number in range(2001, 2009):
            settle(archive, connection, number)
    await eventually(lambda: find(archive.url, margin="2s").time > latest(archive))
    more = {"maxRowsPerTrigger": 7, "numPartitions": 2}
    query = await started(spark, archive, tmp_path, trigger=every, **more)
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    table = [*range(1, archive.count() - 23), *range(1001, 1017), *range(2001, 2009)]
    assert ids(spark, tmp_path) == table
    ends = sorted(end_of(path) for path in offsets.glob("[0-9]*"))
    assert len(ends) >= stopped_at + 2
    with archive.engine.connect() as connection:
        times = connection.execute(select(archive.archive.c.archived_at)).scalars().all()
    sizes = [
        sum(first <= time < end for time in times)
        for first, end in itertools.pairwise([START, *ends])
    ]
    assert sum(sizes) == len(table)
    assert max(sizes) == 7


def end_of(batch: Path) -> datetime:
    """Of a micro-batch, by its file in the checkpoint."""
    return from_offset(json.loads(batch.read_text().splitlines()[2]))


def latest(archive: Archive) -> datetime:
    with archive.engine.connect() as connection:
        return connection.execute(select(func.max(archive.archive.c.archived_at))).scalar_one()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
async def test_a_password_of_any_characters_is_in_no_checkpoint(
    spark: SparkSession,
    new_database: Any,
    kind: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """D5: the reader's user has no privileges but SELECT, so the horizon keeps the safety lag."""
    archive = new_database(kind)
    archive.add_many(5)
    user = f"stream_{random.randrange(10**9)}"
    url = make_url(archive.url).set(username=user, password=SECRET)
    with as_user(archive, user):
        shown = Archive.__new__(Archive)
        shown.url = url.render_as_string(hide_password=False)
        now = {"availableNow": True}
        query = await started(spark, shown, tmp_path, trigger=now, safetyLag="1s")
        assert query.awaitTermination(240)
        assert ids(spark, tmp_path) == [1, 2, 3, 4, 5]
        frame = spark.read.format("sqlbroker").options(
            url=url.set(password=None).render_as_string()
        )
        assert frame.option("password", SECRET).load().count() == 5
    texts = ["".join(capfd.readouterr())]
    texts += [
        path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    ]
    for hidden in (SECRET, "se%40s", "se@s"):
        assert not [text for text in texts if hidden in text]


@contextmanager
def as_user(archive: Archive, user: str) -> Iterator[None]:
    """A user that may only read, with the secret for a password."""
    quoted = "'" + SECRET.replace("'", "''") + "'"
    if archive.kind == "postgresql":
        made = [
            f"CREATE ROLE {user} LOGIN PASSWORD {quoted}",
            f"GRANT SELECT ON message_archive TO {user}",
        ]
        gone = [f"DROP OWNED BY {user}", f"DROP ROLE {user}"]
    else:
        escaped = quoted.replace("\\", "\\\\")
        made = [
            f"CREATE USER {user} IDENTIFIED BY {escaped}",
            f"GRANT SELECT ON message_archive TO {user}",
        ]
        gone = [f"DROP USER {user}"]
    for statement in made:
        with archive.engine.begin() as connection:
            connection.exec_driver_sql(statement.replace("%", "%%"))
    try:
        yield
    finally:
        for statement in gone:
            archive.execute(statement)


def test_limits_make_windows(archive: Archive, soon: None) -> None:
    """Rows of one moment stay together; empty times are skipped, not walked through."""
    times = [0, 1, 1, 1, 1, 2, 3, 1000, 1001, 100000]
    archive.add(
        *({"id": n, "archived_at": START + timedelta(seconds=s)} for n, s in enumerate(times))
    )

    def windows(**options: str) -> list[list[int]]:
        query = Query(archive, **options)
        while query.trigger():
            pass
        return query.windows

    assert windows() == [list(range(10))]
    assert windows(maxRowsPerTrigger="3") == [[0], [1, 2, 3, 4], [5, 6, 7], [8, 9]]
    assert windows(maxWindowPerTrigger="2s") == [[0, 1, 2, 3, 4], [5, 6], [7, 8], [9]]
    assert windows(maxWindowPerTrigger="1h", maxRowsPerTrigger="6") == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8],
        [9],
    ]
    assert windows(startingTimestamp="2026-03-01T00:00:03Z", maxRowsPerTrigger="2") == [
        [6, 7],
        [8, 9],
    ]
    assert windows(queues="none") == []


def test_offsets_never_go_back(archive: Archive, soon: None) -> None:
    """A horizon below what was read, as after a longer safety lag, gives nothing until it has
    passed that."""
    archive.add_many(5)
    query = Query(archive)
    assert query.trigger()
    read, query.offset = query.offset, to_offset(datetime(2100, 1, 1, tzinfo=timezone.utc))
    archive.add_many(5, first=6, step=timedelta(hours=1))
    query.restart()
    assert not query.trigger()
    assert read is not None
    assert query.reader.partitions(query.offset, read) == []
    assert query.reader.latestOffset() == query.offset


def test_only_ends_of_other_runs_are_asked_for(
    archive: Archive, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A horizon may take seconds: what this run has found by one is not asked for again."""
    archive.add_many(6)
    query = Query(archive, maxRowsPerTrigger="3")
    asked = list[datetime]()
    ask = stream.find_horizon
    monkeypatch.setattr(
        stream, "find_horizon", lambda *given, **more: asked.append(START) or ask(*given, **more)
    )
    query.trigger()
    assert len(asked) == 1
    query.trigger(twice=True)
    assert len(asked) == 3
    assert query.windows == [[1, 2, 3], [4, 5, 6]]


def test_rows_that_were_pruned_are_missed(archive: Archive, soon: None) -> None:
    """D5: as long as a row from before the window is left, nothing of the window has gone."""
    archive.add_many(20)
    query = Query(archive, maxRowsPerTrigger="5")
    query.trigger()
    archive.execute("DELETE FROM message_archive WHERE id < 3")
    query.trigger()
    archive.execute("DELETE FROM message_archive WHERE id < 14")
    with pytest.raises(
        StoreError, match=r"unread rows may have been pruned too.*failOnDataLoss=false"
    ):
        query.trigger()
    assert query.rows == list(range(1, 11))
    offset, query = query.offset, Query(archive, failOnDataLoss="false")
    query.offset = offset
    query.restart()
    query.trigger()
    assert query.rows == list(range(14, 21))
    # A query that begins is not concerned.
    assert Query(archive, startingTimestamp=START.isoformat()).trigger()


def test_rows_of_its_queues_that_were_pruned_alone_are_missed(archive: Archive, soon: None) -> None:
    """D5: rows of other queues from before the window say nothing of its own."""
    queues = {1: "a", 2: "b", 3: "a"}
    archive.add(
        *({"id": n, "queue": queue, "archived_at": START + DAY * n} for n, queue in queues.items())
    )
    query = Query(archive, queues="a", maxRowsPerTrigger="1")
    query.trigger()
    assert prune_archive(archive.url, older_than="0s", queues=["a"]).rows == 2
    archive.add({"id": 4, "queue": "a", "archived_at": START + DAY * 4})
    with pytest.raises(StoreError, match="the archive has no earlier row of its queues"):
        query.trigger()
    assert query.rows == [1]


def test_completed_rows_that_were_pruned_alone_are_missed(archive: Archive, soon: None) -> None:
    """D5: by a stream of them; one of all states cannot tell, as another state keeps older rows."""
    states = {1: "FAILED", 2: "COMPLETED", 3: "COMPLETED", 4: "FAILED"}
    archive.add(
        *({"id": n, "state": state, "archived_at": START + DAY * n} for n, state in states.items())
    )
    of_all = Query(archive, maxRowsPerTrigger="2")
    of_completed = Query(archive, states="completed", maxRowsPerTrigger="1")
    of_failed = Query(archive, states="failed", maxRowsPerTrigger="1")
    for query in (of_all, of_completed, of_failed):
        query.trigger()
    archive.execute("DELETE FROM message_archive WHERE state = 'COMPLETED'")
    archive.add({"id": 5, "archived_at": START + DAY * 5})
    with pytest.raises(StoreError, match="no earlier row of its queues and states"):
        of_completed.trigger()
    of_all.trigger()
    assert (of_all.rows, of_completed.rows) == ([1, 2, 4, 5], [2])
    # A dead letter that was redriven is no sign of a prune.
    archive.add({"id": 6, "archived_at": START})
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    of_failed.trigger()
    assert of_failed.rows == [1, 4]


async def test_a_stream_refuses_impossible_options(
    spark: SparkSession, new_database: Any, tmp_path: Path
) -> None:
    url = "postgresql://user@host/name"
    with pytest.raises(NotSupportedError, match="the live table cannot be read as a stream"):
        make_stream_reader(
            parse_options({"url": url, "kind": "messages"}, streaming=True), ARCHIVE_SCHEMA
        )
    reader = make_stream_reader(parse_options({"url": url}, streaming=True), ARCHIVE_SCHEMA)
    with pytest.raises(
        SetupError, match=r"offset of another source, .*: use another checkpoint folder"
    ):
        reader.partitions({"offset": 1}, {"offset": 2})
    archive = new_database("sqlite")
    with pytest.raises(
        Exception, match=r"'since' is not allowed with spark.readStream; allowed are url"
    ):
        now = {"availableNow": True}
        query = await started(spark, archive, tmp_path, trigger=now, since="2026-03-01")
        query.awaitTermination(240)


@pytest.fixture
def admission(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`pyspark.sql.streaming.datasource`: Spark's own from 4.2 on, else its shape."""
    if get_spark_version() >= LIMITS_VERSION:
        from pyspark.sql.streaming import datasource

        return datasource
    module: Any = ModuleType("pyspark.sql.streaming.datasource")
    module.SupportsTriggerAvailableNow = type("SupportsTriggerAvailableNow", (), {})
    module.ReadAllAvailable = type("ReadAllAvailable", (), {})
    module.ReadMaxRows = type(
        "ReadMaxRows", (), {"__init__": lambda self, rows: setattr(self, "max_rows", rows)}
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(spark_streaming, "datasource", module, raising=False)
    monkeypatch.setattr(stream, "get_spark_version", lambda: (4, 2))
    monkeypatch.delitem(sys.modules, "pyspark_sqlbroker.source.admission", raising=False)
    return module


def test_available_now_keeps_the_limits_from_spark_4_2_on(
    archive: Archive, soon: None, admission: Any
) -> None:
    """The reader as Spark 4.2 calls it: windows until the horizon of its beginning, none beyond."""
    archive.add_many(20)

    def run(**options: str) -> Counter[int]:
        reader: Any = make_stream_reader(
            parse_options({"url": archive.url, **options}, streaming=True), ARCHIVE_SCHEMA
        )
        assert isinstance(reader, admission.SupportsTriggerAvailableNow)
        reader.prepareForTriggerAvailableNow()
        target = reader.reportLatestOffset()
        sizes = Counter()
        offset = reader.initialOffset()
        while (end := reader.latestOffset(offset, reader.getDefaultReadLimit())) != offset:
            rows = sum(
                batch.num_rows
                for cut in reader.partitions(offset, end)
                for batch in reader.read(cut)
            )
            sizes[rows] += 1
            offset = end
        assert from_offset(offset) <= from_offset(target)
        # The engine's own "all" overrides the limits.
        assert reader.latestOffset(reader.initialOffset(), admission.ReadAllAvailable()) == target
        return sizes

    assert run() == {20: 1}
    assert run(maxRowsPerTrigger="8") == {8: 2, 4: 1}
    assert run(maxWindowPerTrigger="7s") == {7: 2, 6: 1}
    assert run(maxWindowPerTrigger="7s", maxRowsPerTrigger="5") == {5: 4}
