"""Horizons that need their own server: standbys, prepared transactions, time zones, replicas."""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import make_url, text

import tools.pair
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.exceptions import SetupError, TransientStoreError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.horizon import find_horizon, mysql
from pyspark_sqlbroker.horizon.mysql import build_timestamp
from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA
from pyspark_sqlbroker.source.options import parse_options
from pyspark_sqlbroker.source.stream import StreamReader, from_offset
from tests.conftest import Servers
from tests.helpers import eventually
from tests.spark.conftest import Archive
from tests.spark.horizons import archived_at, find, held, rows_before, settle, stands_still
from tools import private

MINUTE = timedelta(minutes=1)


class Pair:
    """A primary and its standby."""

    def __init__(self, primary: str, follower: str) -> None:
        self.archive = Archive(primary)
        self.primary = primary
        self.standby = follower

    def on_standby(self, statement: str) -> None:
        """Run SQL there."""
        database = get_database(parse_address(self.standby))
        with database.connect() as connection:
            connection.exec_driver_sql(statement)

    def rows(self, until: datetime) -> set[int]:
        """What the standby has before `until`."""
        database = get_database(parse_address(self.standby))
        with database.connect() as connection:
            condition = f"archived_at < {database.format_time(until)}"
            return set(
                connection.exec_driver_sql(
                    f"SELECT id FROM message_archive WHERE {condition}"
                ).scalars()
            )


def cannot(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def servers_of_two() -> Iterator[Pair]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(tools.pair.pair(max_prepared_transactions="5"))
        except private.CannotStartError as error:
            cannot(str(error))
        pair = Pair(made.primary.url, made.standby.url)
        yield pair
        pair.archive.engine.dispose()


@pytest.fixture
def pair(servers_of_two: Pair) -> Pair:
    servers_of_two.archive.execute("DELETE FROM message_archive")
    return servers_of_two


def test_a_standby_asks_its_primary(pair: Pair) -> None:
    """D4: the primary's transactions are looked at, and then replayed: late ones are neither passed
    nor lost."""
    with pair.archive.engine.connect() as writer:
        settle(pair.archive, writer, 1)
        at = archived_at(pair.archive, writer, 1)
        with pair.archive.engine.begin() as quick:
            settle(pair.archive, quick, 2)
        horizon = find(pair.standby, primary=pair.primary)
        assert (horizon.source, horizon.time <= at) == ("primary", True)
        writer.commit()
    for number in range(3, 8):
        with pair.archive.engine.begin() as writer:
            # The commit is in the log's buffers only for a while.
            writer.execute(text("SET LOCAL synchronous_commit = off"))
            settle(pair.archive, writer, number)
        horizon = find(pair.standby, primary=pair.primary)
        assert (
            pair.rows(horizon.time)
            == set(range(1, number + 1))
            == rows_before(pair.archive, horizon)
        )


async def test_a_stream_that_goes_on_by_a_standby(pair: Pair) -> None:
    """D4: a batch that was planned on the primary waits for the standby; no row of it is lost."""

    def open_reader(url: str, **options: str) -> StreamReader:
        given = {"url": url, "numPartitions": "1", **options}
        return StreamReader(parse_options(given, streaming=True), ARCHIVE_SCHEMA)

    pair.archive.add({"id": 1})
    primary = open_reader(pair.primary)
    start = primary.initialOffset()
    end = primary.latestOffset()
    (cut,) = primary.partitions(start, end)
    assert [batch["id"].to_pylist() for batch in primary.read(cut)] == [[1]]
    await eventually(lambda: pair.rows(from_offset(end)) == {1})
    standby = open_reader(pair.standby, safetyLag="1h")
    assert standby.partitions(start, start) == []
    with pytest.raises(
        TransientStoreError, match=r"this server is complete only up to .*, so rows would be lost"
    ):
        standby.partitions(start, end)
    reader = open_reader(pair.standby, primary=pair.primary)
    (cut,) = reader.partitions(start, end)
    assert [batch["id"].to_pylist() for batch in reader.read(cut)] == [[1]]


async def test_a_standby_without_its_primary_lags_behind_its_replay(pair: Pair) -> None:
    """However far the clock has gone: a standby may be behind for hours."""
    with pair.archive.engine.begin() as writer:
        settle(pair.archive, writer, 1)
        at = archived_at(pair.archive, writer, 1)
    await eventually(lambda: pair.rows(at + MINUTE) == {1})
    pair.on_standby("SELECT pg_wal_replay_pause()")
    database = get_database(parse_address(pair.standby))
    try:
        with database.connect() as connection:
            await eventually(
                lambda: (
                    database.fetch_scalar(connection, "SELECT pg_get_wal_replay_pause_state()")
                    == "paused"
                )
            )
        with pair.archive.engine.begin() as writer:
            settle(pair.archive, writer, 2)
            late = archived_at(pair.archive, writer, 2)
        behind = find(pair.standby, safety_lag=0)
        assert behind.source == "safety lag"
        assert at <= behind.time <= late
        assert "this standby has replayed" in behind.detail
        assert find(pair.standby, safety_lag="1m").time == behind.time - MINUTE
        with pytest.raises(TransientStoreError, match="did not replay the primary's position"):
            find(pair.standby, primary=pair.primary, patience=0.2)
    finally:
        pair.on_standby("SELECT pg_wal_replay_resume()")
    assert pair.rows(find(pair.standby, primary=pair.primary).time) == {1, 2}


def test_a_server_that_is_not_the_primary_is_refused(pair: Pair, servers: Servers) -> None:
    other = servers.admin("postgresql").url.render_as_string(hide_password=False)
    for wrong, words in (
        (other, "another cluster or database"),
        (
            make_url(pair.primary).set(database="template1").render_as_string(),
            "another cluster or database",
        ),
        (pair.standby, "is itself a standby"),
        ("sqlite:////tmp/none.db", "got a sqlite database"),
    ):
        with pytest.raises(SetupError, match=words):
            find(pair.standby, primary=wrong)


def test_a_prepared_transaction(pair: Pair) -> None:
    """Its beginning is unknown: it is taken to be at most the lag before it was prepared."""
    with pair.archive.engine.connect() as writer:
        settle(pair.archive, writer, 1)
        at = archived_at(pair.archive, writer, 1)
        writer.execute(text("PREPARE TRANSACTION 'p'"))
    database = get_database(parse_address(pair.primary))
    with database.connect() as connection:
        after = database.get_time(connection)
        try:
            horizon = find(pair.primary, safety_lag="1m")
            assert horizon.source == "safety lag"
            assert "prepared" in horizon.detail
            assert at - MINUTE <= horizon.time <= after - MINUTE
            assert find(pair.standby, primary=pair.primary, safety_lag="1m").time == horizon.time
        finally:
            connection.exec_driver_sql("COMMIT PREPARED 'p'")
    assert rows_before(pair.archive, find(pair.primary)) == {1}


def test_rows_of_a_publication_come_with_their_own_times(pair: Pair) -> None:
    database = get_database(parse_address(pair.primary))
    options = "connect = false, slot_name = NONE, enabled = false"
    with database.connect() as connection:
        connection.exec_driver_sql(
            f"CREATE SUBSCRIPTION s CONNECTION '' PUBLICATION p WITH ({options})"
        )
        try:
            horizon = find(pair.primary, safety_lag="1m")
            assert (horizon.source, "subscribes" in horizon.detail) == ("safety lag", True)
            assert database.get_time(connection) - horizon.time >= MINUTE
        finally:
            connection.exec_driver_sql("DROP SUBSCRIPTION s")
    assert find(pair.primary).source == "transactions"


@pytest.fixture(scope="module")
def mariadb_in_new_york() -> Iterator[Archive]:
    """A MariaDB whose own time zone has hours that come twice."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("TZ", "America/New_York")
        try:
            url, _ = stack.enter_context(private.mariadb())
        except private.CannotStartError as error:
            cannot(str(error))
        with get_database(parse_address(url)).connect() as connection:
            connection.exec_driver_sql("CREATE DATABASE shop")
        archive = Archive(make_url(url).set(database="shop").render_as_string())
        yield archive
        archive.engine.dispose()


@pytest.fixture
def in_new_york(mariadb_in_new_york: Archive) -> Archive:
    mariadb_in_new_york.execute("DELETE FROM message_archive")
    return mariadb_in_new_york


@pytest.mark.parametrize(
    ("local", "utc"),
    [
        ("2026-11-01 00:59:59", datetime(2026, 11, 1, 4, 59, 59, tzinfo=timezone.utc)),
        ("2026-11-01 01:30:00", datetime(2026, 11, 1, 5, 30, tzinfo=timezone.utc)),
        ("2026-11-01 02:00:00", datetime(2026, 11, 1, 7, 0, tzinfo=timezone.utc)),
        ("2026-03-08 03:00:00", datetime(2026, 3, 8, 7, 0, tzinfo=timezone.utc)),
        ("2026-07-01 12:00:00", datetime(2026, 7, 1, 16, 0, tzinfo=timezone.utc)),
    ],
)
def test_the_hour_that_comes_twice_is_the_earlier(
    in_new_york: Archive, local: str, utc: datetime
) -> None:
    """InnoDB says when transactions began in the server's time zone."""
    database = get_database(parse_address(in_new_york.url))
    with database.connect() as connection:
        seconds = database.fetch_scalar(
            connection, f"SELECT {build_timestamp(f'TIMESTAMP{local!r}')}"
        )
    assert from_microseconds(int(seconds * 1_000_000)) == utc


def test_a_server_in_another_time_zone(in_new_york: Archive) -> None:
    database = get_database(parse_address(in_new_york.url))
    with in_new_york.engine.connect() as writer, database.connect() as connection:
        connection.exec_driver_sql("SET time_zone = '+05:30'")
        before = database.get_time(connection)
        settle(in_new_york, writer, 1)
        at = archived_at(in_new_york, writer, 1)
        horizon = find_horizon(database, connection, margin=0)
        assert horizon.source == "transactions"
        assert database.fetch_scalar(connection, "SELECT @@session.time_zone") == "+05:30"
        # InnoDB's times are of whole seconds.
        assert before - timedelta(seconds=1) <= horizon.time <= at
        writer.rollback()


def test_a_server_that_others_write_to(in_new_york: Archive) -> None:
    """A replica's rows come late, with the times of their origin."""
    in_new_york.execute("SET GLOBAL read_only = ON")
    try:
        horizon = find(in_new_york.url)
        assert (horizon.source, "read_only" in horizon.detail) == ("safety lag", True)
    finally:
        in_new_york.execute("SET GLOBAL read_only = OFF")
    assert find(in_new_york.url).source == "transactions"


async def test_a_statement_under_way(in_new_york: Archive) -> None:
    """It has the time of its start, and may write at its end."""
    await stands_still(in_new_york, "1 running statements")


async def test_an_xa_transaction_whose_client_has_gone(in_new_york: Archive) -> None:
    """Its beginning is unknown if the server was restarted since."""
    name = f"x{os.getpid()}"
    writer = in_new_york.engine.connect()
    writer.exec_driver_sql(f"XA START '{name}'")
    settle(in_new_york, writer, 1)
    at = archived_at(in_new_york, writer, 1)
    writer.exec_driver_sql(f"XA END '{name}'")
    writer.exec_driver_sql(f"XA PREPARE '{name}'")
    writer.invalidate()
    writer.close()
    try:
        # The server sees some time later that the client has gone.
        await eventually(lambda: find(in_new_york.url).source == "safety lag")
        assert find(in_new_york.url, safety_lag="60s").time <= at - MINUTE
    finally:
        with in_new_york.engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(
                f"XA ROLLBACK '{name}'"
            )
    assert find(in_new_york.url).source == "transactions"


async def test_a_list_of_transactions_that_stays_old(
    in_new_york: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InnoDB shows an old list for as long as it is read more often than every 0.1 s."""
    monkeypatch.setattr(mysql, "MAX_REFRESH_WAIT", 0.3)
    numbers = itertools.count()
    with in_new_york.engine.connect() as writer:

        def is_old() -> bool:
            number = next(numbers)
            settle(in_new_york, writer, number)
            horizon = find(in_new_york.url)
            assert horizon.time <= archived_at(in_new_york, writer, number)
            writer.commit()
            return horizon.source == "safety lag"

        with held(
            in_new_york,
            "BEGIN NOT ATOMIC WHILE IS_USED_LOCK('gate') DO "
            "SELECT count(*) INTO @n FROM information_schema.innodb_trx; "
            "DO SLEEP(0.02); END WHILE; END",
        ):
            await eventually(is_old)
    assert find(in_new_york.url).source == "transactions"
