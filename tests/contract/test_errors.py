"""Which database errors are transient, by the database's own codes."""

from typing import Any

import pytest
from sqlalchemy import event, text

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.errors import UnavailableError
from faststream_sqlbroker.database.mysql.error_codes import READ_ONLY
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from tests.contract.conftest import Bench

WORDS = "busy, locked, interrupted; disk is full, disk I/O error"
"""SQLite's texts of transient errors, which any producer may write into a message."""

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

OUTAGES = {
    # A connection that broke, a rollback, a lack of resources, a standby, a limit of idle sessions,
    # a shutdown, a crash, a start, a database that is dropped, a failed disk.
    "postgresql": "08006 08P01 40001 53300 25006 25P03 57P01 57P02 57P03 57P04 58030",
    # Galera: a node that is not ready, a refused COMMIT, a conflict. Read-only: by a setting, in a
    # transaction, as a mode. Group replication: a refused COMMIT, waits for a new primary or for
    # the group, a switch of the primary. A shutdown, offline mode. ProxySQL: no server answers.
    "mysql": "1047 1180 1213 1290 1792 1836 1874 3100 3101 3781 3782 3783 3796 3797 3798 3799 4094 "
    "1053 3032 4312 4313 9001 9002 9004",
}
OUTAGES["mariadb"] = OUTAGES["mysql"]
"""Errors that servers, and proxies before them, send while another one takes over."""
RAISE = {
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION 'away' USING ERRCODE = '{}'; END $$",
    "mysql": "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {}, MESSAGE_TEXT = 'away'",
}
RAISE["mariadb"] = RAISE["mysql"]


@pytest.mark.parametrize("database", OUTAGES, indirect=True)
async def test_a_server_that_is_replaced_is_away(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses nothing for good, and the pool has nothing to say of it."""
    kind = bench.store.dialect_name
    for code in OUTAGES[kind].split():
        raise_error = RAISE[kind].format(code)
        with pytest.raises(TransientStoreError, match="away") as caught:
            await bench.store._database.run(lambda c, sql=raise_error: c.exec_driver_sql(sql))
        # Such an error is no fault of a batch, which is not quarantined.
        is_read_only = code == "25006" if kind == "postgresql" else int(code) in READ_ONLY
        assert isinstance(caught.value, UnavailableError) == is_read_only
    assert caplog.records == []


async def test_only_transactions_without_an_error_are_answers(bench: Bench) -> None:
    store = bench.store
    before = store.count_answers()
    with pytest.raises(StoreError):
        await store._database.run(lambda c: c.exec_driver_sql("no statement"))
    assert store.count_answers() == before
    assert await store.access.ping(None)
    assert store.count_answers() > before


@on_sqlite
async def test_words_of_a_message_make_no_error_a_passing_one(bench: Bench) -> None:
    await bench.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON message WHEN NEW.queue = 'refused' "
        "BEGIN SELECT RAISE(ABORT, 'not this queue: it is busy'); END"
    )
    with pytest.raises(StoreError, match="not this queue") as caught:
        await bench.store.insert([NewMessage("refused", WORDS.encode(), key=WORDS)])
    assert not isinstance(caught.value, TransientStoreError)


@on_sqlite
async def test_a_locked_database_passes(bench: Bench) -> None:
    store = Store(bench.store.engine, bench.store.tables, statement_timeout=0.5)
    async with bench.store.engine.connect() as connection:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(TransientStoreError):
            await store.insert([NewMessage("q", b"")])


@on_sqlite
async def test_a_full_database_passes(bench: Bench) -> None:
    """The limit is the connection's, so every connection gets it."""

    @event.listens_for(bench.store.engine.sync_engine, "checkout")
    def limit(connection: Any, _record: Any, _proxy: Any) -> None:
        connection.cursor().execute("PRAGMA max_page_count = 1")

    with pytest.raises(TransientStoreError, match="full"):
        await bench.store.insert([NewMessage("q", bytes(1_000_000))])


@on_sqlite
async def test_a_stale_read_transaction_gets_an_error_with_the_remedy(bench: Bench) -> None:
    async with bench.store.engine.connect() as connection:
        await connection.exec_driver_sql("BEGIN")
        await connection.execute(text("SELECT count(*) FROM message"))
        await bench.put(1)
        with pytest.raises(TransientStoreError, match="BEGIN IMMEDIATE"):
            await bench.store.insert_in(connection, [NewMessage("q", b"")])


@on_sqlite
async def test_a_refusal_in_the_callers_transaction_is_not_taken_for_a_lock(bench: Bench) -> None:
    await bench.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON message BEGIN SELECT RAISE(ABORT, 'locked'); END"
    )
    async with bench.store.engine.connect() as connection:
        with pytest.raises(StoreError, match="locked") as caught:
            await bench.store.insert_in(connection, [NewMessage("q", WORDS.encode())])
    assert not isinstance(caught.value, TransientStoreError)
