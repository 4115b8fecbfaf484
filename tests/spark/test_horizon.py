"""The horizon: what was archived before it is committed, and nothing is added there any more."""

import asyncio
import os
import sqlite3
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from faststream_sqlbroker.exceptions import NotSupportedError, SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.horizon import Horizon, find_horizon
from tests.helpers import eventually
from tests.spark.conftest import Archive
from tests.spark.horizons import (
    GATES,
    archived_at,
    find,
    held,
    passes,
    rows_before,
    settle,
    stands_still,
)

servers_only = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
mariadb_only = pytest.mark.parametrize("database", ["mariadb"], indirect=True)
sqlite_only = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "commit", "rollback", "horizon"]), st.integers(0, 2)
    ),
    min_size=5,
    max_size=25,
)


async def test_an_open_transaction_holds_the_horizon(archive: Archive) -> None:
    """D4: a row that is not committed is not passed, and is as soon as it is."""
    with archive.engine.connect() as writer:
        settle(archive, writer, 1)
        at = archived_at(archive, writer, 1)
        horizon = find(archive.url, patience=0.1)
        assert horizon.time <= at
        assert horizon.source == ("safety lag" if archive.kind == "sqlite" else "transactions")
        writer.commit()
    await passes(archive, {1})


@servers_only
def test_a_transaction_without_writes_does_not_hold_the_horizon(archive: Archive) -> None:
    """A report that is open for hours: what it writes later gets a later time."""
    with archive.engine.connect() as idle:
        idle.execute(text("SELECT count(*) FROM message_archive"))
        horizon = find(archive.url)
        assert horizon.source == "transactions"
        settle(archive, idle, 1)
        assert archived_at(archive, idle, 1) >= horizon.time
        idle.commit()


@postgresql_only
async def test_a_running_statement_holds_the_horizon(archive: Archive) -> None:
    """It has the time of its start, and may write at its end."""
    await stands_still(archive, "1 transactions that")


@postgresql_only
async def test_a_procedure_that_commits_on_its_way(archive: Archive) -> None:
    """Its second transaction is younger than the time that its rows get."""
    archive.execute("CREATE TABLE t (at timestamptz)")
    with held(
        archive,
        "DO $$ BEGIN PERFORM pg_sleep(0.1); COMMIT; INSERT INTO t SELECT statement_timestamp(); "
        f"PERFORM {GATES['postgresql'][0]}; END $$",
    ):
        database = get_database(parse_address(archive.url))
        with database.connect() as connection:
            await eventually(
                lambda: database.fetch_scalar(
                    connection,
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND backend_xid IS NOT NULL "
                    "AND xact_start > query_start",
                )
            )
            horizon = find_horizon(database, connection, margin=0)
    with archive.engine.connect() as connection:
        assert connection.execute(text("SELECT at FROM t")).scalar_one() >= horizon.time


@given(steps=STEPS)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_nothing_is_added_below_any_horizon(archive: Archive, steps: list[tuple[str, int]]) -> None:
    """D4, by a model: three sessions write, read, commit and roll back in any order, without a
    margin."""
    archive.execute("DELETE FROM message_archive")
    engine = create_engine(
        archive.engine.url, connect_args={"timeout": 0} if archive.kind == "sqlite" else {}
    )
    seen: list[tuple[Horizon, set[int]]] = []
    written: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    committed: set[int] = set()
    with ExitStack() as stack:
        sessions = [stack.enter_context(engine.connect()) for _ in written]
        for number, (step, who) in enumerate([*steps, *(("commit", who) for who in written)]):
            if step == "write":
                try:
                    settle(archive, sessions[who], number)
                    written[who].add(number)
                except OperationalError:  # SQLite: another one writes
                    sessions[who].rollback()
                    written[who] = set()
            elif step == "read":
                sessions[who].execute(text("SELECT count(*) FROM message_archive"))
            elif step == "horizon":
                horizon = find(archive.url, patience=0.001)
                seen.append((horizon, rows_before(archive, horizon)))
            else:
                getattr(sessions[who], step)()
                committed |= written[who] if step == "commit" else set()
                written[who] = set()
        asyncio.run(passes(archive, committed))
    for horizon, rows in seen:
        assert rows_before(archive, horizon) == rows
    engine.dispose()


@postgresql_only
@pytest.mark.usefixtures("alone")
async def test_postgresql_hides_others_sessions_from_a_plain_role(archive: Archive) -> None:
    """D4: what cannot be seen is waited for by the lag, and the text says what to grant."""
    role = f"sqlbroker_plain_{os.getpid()}"
    archive.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'plain'")
    url = (
        make_url(archive.url)
        .set(username=role, password="plain")
        .render_as_string(hide_password=False)
    )
    try:
        with archive.engine.connect() as writer:
            settle(archive, writer, 1)
            database = get_database(parse_address(url))
            with database.connect() as connection:
                before = database.get_time(connection)
                lagging = find_horizon(database, connection, safety_lag="90s", margin=0)
                after = database.get_time(connection)
                assert before <= lagging.time + timedelta(seconds=90) <= after
            assert lagging.source == "safety lag"
            assert "pg_read_all_stats" in lagging.detail
            writer.rollback()
        archive.execute(f"GRANT pg_read_all_stats TO {role}")
        assert find(url).source == "transactions"
        archive.execute(f"REVOKE pg_read_all_stats FROM {role}")
        archive.engine.dispose()
        # Alone, there is no session to be hidden; one that was closed ends a moment later.
        await eventually(lambda: find(url).source == "transactions")
    finally:
        archive.execute(f"DROP ROLE {role}")


@postgresql_only
def test_sessions_that_do_not_tell_what_they_do(archive: Archive) -> None:
    with archive.engine.connect() as silent:
        silent.execute(text("SET track_activities = off"))
        silent.commit()
        settle(archive, silent, 1)
        horizon = find(archive.url)
        assert horizon.source == "safety lag"
        assert horizon.time < archived_at(archive, silent, 1)
        silent.rollback()


@mariadb_only
def test_a_session_that_looks_again_sees_what_began_in_between(archive: Archive) -> None:
    """InnoDB's list of transactions stays for a tenth of a second, with the session's own look."""
    database = get_database(parse_address(archive.url))
    with database.connect() as reader, archive.engine.connect() as writer:
        writer.exec_driver_sql("SELECT 1")
        writer.rollback()
        find_horizon(database, reader, margin=0)
        settle(archive, writer, 1)
        again = find_horizon(database, reader, margin=0)
        assert again.time <= archived_at(archive, writer, 1)
        writer.rollback()


@mariadb_only
def test_mariadb_hides_transactions_without_the_privilege(archive: Archive) -> None:
    """D4: as on PostgreSQL."""
    user = f"sqlbroker_{os.getpid()}"
    name = make_url(archive.url).database
    url = (
        make_url(archive.url)
        .set(username=user, password="plain")
        .render_as_string(hide_password=False)
    )
    archive.execute(f"CREATE USER {user}@'%' IDENTIFIED BY 'plain'")
    try:
        archive.execute(f"GRANT SELECT ON {name}.* TO {user}@'%'")
        with archive.engine.connect() as writer:
            settle(archive, writer, 1)
            lagging = find(url)
            assert (lagging.source, "GRANT PROCESS" in lagging.detail) == ("safety lag", True)
            assert lagging.time < archived_at(archive, writer, 1)
            archive.execute(f"GRANT PROCESS ON *.* TO {user}@'%'")
            seen = find(url)
            assert seen.source == "transactions"
            assert seen.time <= archived_at(archive, writer, 1)
            writer.rollback()
    finally:
        archive.execute(f"DROP USER {user}@'%'")


@sqlite_only
def test_a_file_that_cannot_be_written(archive: Archive) -> None:
    database = get_database(parse_address(archive.url))
    name = make_url(archive.url).database
    engine = create_engine(f"sqlite:///file:{name}?mode=ro&uri=true", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        horizon = find_horizon(database, connection, safety_lag="1h")
        assert horizon.source == "safety lag"
        assert "readonly" in horizon.detail
        assert database.get_time(connection) - horizon.time >= timedelta(hours=1)
    engine.dispose()


@sqlite_only
def test_sqlite_lets_its_lock_go(archive: Archive) -> None:
    find(archive.url)
    with closing(sqlite3.connect(str(make_url(archive.url).database), timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.rollback()


def test_impossible_margins_and_lengths_are_refused(archive: Archive) -> None:
    near = find(archive.url)
    far = find(archive.url, margin="1h")
    if archive.kind != "sqlite":
        assert far.time < near.time - timedelta(minutes=59)
    with pytest.raises(SetupError, match="safety_lag must be 0 or more"):
        find(archive.url, safety_lag=-1)
    with pytest.raises(SetupError, match="margin cannot be 'soon'"):
        find(archive.url, margin="soon")


@pytest.mark.parametrize("database", ["sqlite", "mariadb"], indirect=True)
def test_only_postgresql_has_a_primary_to_ask(archive: Archive) -> None:
    with pytest.raises(NotSupportedError, match="primary= is only for PostgreSQL standbys"):
        find(archive.url, primary="postgresql://postgres@127.0.0.1/shop")
