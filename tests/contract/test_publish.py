"""Inserting: values, ids, transactions of the caller."""

import asyncio
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.database.sync_store import SyncStore
from faststream_sqlbroker.exceptions import (
    PublishError,
    SetupError,
    StoreError,
    TransientStoreError,
)
from faststream_sqlbroker.schema.types import clock
from tests.contract.conftest import Bench
from tests.proxy import proxied

PAYLOADS = {
    "empty": b"",
    "text": "grüße".encode(),
    "not utf-8": bytes(range(256)),
    "one mebibyte": b"\x00\xff" * (512 * 1024),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
async def test_any_bytes_come_back_as_they_were(bench: Bench, payload: bytes) -> None:
    await bench.store.insert([NewMessage("q", payload)])
    [row] = await bench.claim()
    assert row.payload == payload


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
@pytest.mark.parametrize("driver", ["aiomysql", "asyncmy"])
async def test_no_part_of_a_body_runs_as_sql(bench: Bench, driver: str) -> None:
    """With NO_BACKSLASH_ESCAPES a quote would end the literal; the drivers escape bytes with
    backslashes always."""
    url = bench.store.engine.url
    engine = create_async_engine(
        url.set(drivername=f"{url.get_backend_name()}+{driver}"),
        connect_args={"init_command": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"},
    )
    other = Store(engine, bench.store.tables)
    body = b"', NULL, 7, NULL, NULL, NOW(), NOW(), NULL) -- "
    try:
        with pytest.raises(SetupError, match="NO_BACKSLASH_ESCAPES"):
            await other.insert([NewMessage("q", body)])
        with pytest.raises(SetupError, match="NO_BACKSLASH_ESCAPES"):
            async with engine.begin() as connection:
                await other.insert_in(connection, [NewMessage("q", body)])
        [claimed_from] = await bench.put()
        [row] = await bench.claim()
        with pytest.raises(SetupError, match="NO_BACKSLASH_ESCAPES"):
            await other.renew([(row.id, row.lease_token)], 60.0)
        assert [row["id"] for row in await bench.rows()] == [claimed_from]
    finally:
        await engine.dispose()


async def test_headers_come_back_as_they_were(bench: Bench) -> None:
    headers = {
        "a": "ü\"'\\",
        "n": 1,
        "f": 1.5,
        "none": None,
        "list": [1, {"x": True}],
        "percent": "%s %(x)s :y",
    }
    await bench.store.insert(
        [NewMessage("q", b"1", headers=json.dumps(headers)), NewMessage("q", b"2")]
    )
    first, second = await bench.claim()
    assert first.headers == headers
    assert second.headers == {}


async def test_a_published_row_has_the_defaults_of_the_table(bench: Bench) -> None:
    before = await bench.store.server.read_now()
    [message_id] = await bench.put()
    after = await bench.store.server.read_now()
    row = await bench.one()
    assert row["id"] == message_id
    assert (row["state"], row["priority"], row["publish_count"]) == ("PENDING", 0, 1)
    assert (row["attempts_count"], row["deliveries_count"]) == (0, 0)
    assert row["created_at"] == row["next_attempt_at"]
    assert before <= row["created_at"] <= after
    for name in (
        "key",
        "dedup_id",
        "origin_id",
        "expires_at",
        "acquired_at",
        "lease_token",
        "last_error",
    ):
        assert row[name] is None


async def test_a_bare_insert_is_a_valid_due_message(bench: Bench) -> None:
    await bench.execute("INSERT INTO message (queue, payload) VALUES ('q', :p)", p=b"bare")
    [row] = await bench.claim()
    assert (row.payload, row.headers, row.deliveries_count) == (b"bare", {}, 1)


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_ids_are_right_whatever_the_step(bench: Bench) -> None:
    """A cluster changes the step between ids when a node joins; MySQL has no INSERT … RETURNING."""
    engine = create_async_engine(bench.store.engine.url, pool_size=1, max_overflow=0)
    store = Store(engine, bench.store.tables)
    await store.insert([NewMessage("q", b"first")])
    told = []
    for step in (3, 2, 1):
        async with engine.connect() as connection:
            await connection.execute(text(f"SET SESSION auto_increment_increment = {step}"))
        told += await store.insert([NewMessage("q", b"x")] * 9)
        told += await store.insert([NewMessage("q", b"x", dedup_id=f"d{step}")])
    await engine.dispose()
    drivers = {"mariadb": "mariadb+pymysql", "mysql": "mysql+pymysql"}
    synchronous = create_engine(engine.url.set(drivername=drivers[engine.dialect.name]))
    with synchronous.begin() as connection:
        connection.execute(text("SET SESSION auto_increment_increment = 3"))
        told += store.insert_sync(connection, [NewMessage("q", b"x")] * 9)
    synchronous.dispose()
    assert told == [row["id"] for row in await bench.rows()][1:]


async def test_ids_stand_in_the_order_of_the_messages(bench: Bench) -> None:
    ids = await bench.put(1_111)
    rows = await bench.rows()
    assert [(r["id"], int(r["payload"])) for r in rows] == list(zip(ids, range(1_111), strict=True))


async def test_six_thousand_messages_pass_through_every_step(bench: Bench) -> None:
    """More than any of its statements takes."""
    from tests.contract.conftest import done

    await bench.put(6_000)
    rows = await bench.claim(6_000)
    assert len(rows) == 6_000
    assert len(await bench.store.renew([(r.id, r.lease_token) for r in rows], 60)) == 6_000
    result = await bench.store.settle([done(r) for r in rows])
    assert len(result.settled_ids) == 6_000
    assert len(await bench.rows(archive=True)) == 6_000


async def test_every_field_is_stored(bench: Bench) -> None:
    at = datetime(2031, 2, 3, 4, 5, 6, 789012, tzinfo=timezone(timedelta(hours=2)))
    await bench.store.insert(
        [
            NewMessage(
                "q", b"", priority=-7, key="k", dedup_id="d", next_attempt_at=at, expires_in=60
            )
        ]
    )
    row = await bench.one()
    assert (row["priority"], row["key"], row["dedup_id"]) == (-7, "k", "d")
    assert row["next_attempt_at"] == at
    assert row["expires_at"] - row["created_at"] == timedelta(seconds=60)


async def test_a_dedup_id_is_taken_once_while_the_message_lives(bench: Bench) -> None:
    store = bench.store
    new = [
        NewMessage("q", b"1", dedup_id="d"),
        NewMessage("q", b"2"),
        NewMessage("q", b"3", dedup_id="d"),
    ]
    first, plain, again = await store.insert(new)
    assert first is not None
    assert plain is not None
    assert again is None
    assert await store.insert([NewMessage("q", b"4", dedup_id="d")]) == [None]
    assert (await store.insert([NewMessage("other", b"5", dedup_id="d")]))[0] is not None
    assert [r["payload"] for r in await bench.rows()] == [b"1", b"2", b"5"]
    from tests.contract.conftest import done

    row = next(r for r in await bench.claim() if r.payload == b"1")
    await store.settle([done(row)])
    assert (await store.insert([NewMessage("q", b"6", dedup_id="d")]))[0] is not None


async def test_queues_and_keys_are_case_sensitive(bench: Bench) -> None:
    await bench.put(1, "Orders")
    await bench.put(1, "orders")
    [row] = await bench.claim(10, "orders")
    assert row.queue == "orders"


async def test_a_publish_as_first_statement_vanishes_with_a_rollback(bench: Bench) -> None:
    async with bench.store.engine.connect() as connection:
        transaction = await connection.begin()
        await bench.store.insert_in(connection, [NewMessage("q", b"")])
        await transaction.rollback()
    assert await bench.rows() == []


async def test_a_publish_is_unseen_until_the_caller_commits(bench: Bench) -> None:
    async with bench.store.engine.connect() as connection:
        await connection.execute(text("SELECT 1"))
        ids = await bench.store.insert_in(connection, [NewMessage("q", b"")])
        assert await bench.claim() == []
        await connection.commit()
    assert [m.id for m in await bench.claim()] == ids


async def test_a_publish_joins_a_session(bench: Bench) -> None:
    async with AsyncSession(bench.store.engine) as session:
        await bench.store.insert_in(session, [NewMessage("q", b"gone")])
        await session.rollback()
        await bench.store.insert_in(session, [NewMessage("q", b"kept")])
        await session.commit()
    assert (await bench.one())["payload"] == b"kept"


async def test_a_duplicate_leaves_the_callers_transaction_usable(bench: Bench) -> None:
    await bench.store.insert([NewMessage("q", b"1", dedup_id="d")])
    async with bench.store.engine.begin() as connection:
        new = [NewMessage("q", b"2", dedup_id="d"), NewMessage("q", b"3")]
        ids = await bench.store.insert_in(connection, new)
        assert ids[0] is None
    assert [r["payload"] for r in await bench.rows()] == [b"1", b"3"]


async def test_a_closed_connection_is_refused(bench: Bench) -> None:
    async with bench.store.engine.connect() as connection:
        pass
    with pytest.raises(PublishError, match="closed"):
        await bench.store.insert_in(connection, [NewMessage("q", b"")])


async def test_an_ended_transaction_is_refused(bench: Bench) -> None:
    async with bench.store.engine.connect() as connection, connection.begin() as transaction:
        await transaction.rollback()
        with pytest.raises(PublishError, match="publish before it ends"):
            await bench.store.insert_in(connection, [NewMessage("q", b"")])


async def test_a_connection_to_another_database_is_refused(bench: Bench, tmp_path: Any) -> None:
    other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
    async with other.connect() as connection:
        with pytest.raises(PublishError, match="broker's database"):
            await bench.store.insert_in(connection, [NewMessage("q", b"")])
    await other.dispose()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_another_address_of_the_same_server_is_accepted(bench: Bench) -> None:
    """A proxy, on either side; the servers are asked once who they are."""
    store = bench.store
    sent: list[str] = []

    @event.listens_for(store.engine.sync_engine, "before_cursor_execute")
    def record(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    async with proxied(store.engine.url) as (_proxy, url):
        engine = create_async_engine(url)
        async with engine.begin() as connection:
            await store.insert_in(connection, [NewMessage("q", b"1")])
            asked = list(sent)
            await store.insert_in(connection, [NewMessage("q", b"2")])
            assert await store.depths.count("q", 10, connection) == 2
        assert asked == sent
        assert len(asked) == 1
        behind_proxy = Store(engine, store.tables)
        async with store.engine.begin() as connection:
            await behind_proxy.insert_in(connection, [NewMessage("q", b"3")])
        await asyncio.to_thread(_publish_from_thread, bench, url)
        await engine.dispose()
    assert [row["payload"] for row in await bench.rows()] == [b"1", b"2", b"3", b"4"]


def _publish_from_thread(bench: Bench, url: URL) -> None:
    driver = f"{url.get_backend_name()}+{SYNC_DRIVERS[bench.store.dialect_name]}"
    own, theirs = (create_engine(u.set(drivername=driver)) for u in (bench.store.engine.url, url))
    store = SyncStore(own, bench.store.tables)
    with theirs.begin() as given, store.open(given) as connection:
        store.insert(connection, [NewMessage("q", b"4")])
    own.dispose()
    theirs.dispose()


SYNC_DRIVERS = {
    "postgresql": "psycopg",
    "mariadb": "pymysql",
    "mysql": "pymysql",
    "sqlite": "pysqlite",
}


async def test_synchronous_code_publishes_in_its_own_transaction(bench: Bench) -> None:
    url = bench.store.engine.url
    engine = create_engine(
        url.set(drivername=f"{url.get_backend_name()}+{SYNC_DRIVERS[bench.store.dialect_name]}")
    )
    try:
        with engine.begin() as connection:
            ids = bench.store.insert_sync(
                connection, [NewMessage("q", b"\xff", priority=3, dedup_id="x")]
            )
            assert bench.store.insert_sync(
                connection, [NewMessage("q", b"\xff", dedup_id="x")]
            ) == [None]
        with Session(engine) as session:
            bench.store.insert_sync(session, [NewMessage("q", b"2")])
            session.rollback()
    finally:
        engine.dispose()
    row = await bench.one()
    assert (row["id"], row["payload"], row["priority"]) == (ids[0], b"\xff", 3)


async def test_a_delay_counts_from_the_statement_not_from_the_transaction(bench: Bench) -> None:
    """F3, design §3: late in a long transaction a delayed message is still in the future."""
    now = select(clock())
    async with bench.store.engine.begin() as connection:
        await connection.execute(text("SELECT 1"))
        await asyncio.sleep(0.1)
        late = (await connection.execute(now)).scalar_one()
        await bench.store.insert_in(connection, [NewMessage("q", b"", delay=0.5)])
    assert (await bench.one())["next_attempt_at"] - late >= timedelta(seconds=0.5)


async def test_the_ready_pairs_say_when_the_next_is_due(bench: Bench, store: Store) -> None:
    await bench.put(1, priority=5, delay=1_000)
    await bench.put(2, priority=-5)
    await bench.put(1, "other")
    pairs = await store.find_ready_pairs(["empty", "q", "other"])
    assert [(p.queue, p.priority) for p in pairs] == [("q", 5), ("q", -5), ("other", 0)]
    assert 800 < pairs[0].due_in <= 1_000
    assert pairs[1].due_in <= 0


@pytest.mark.parametrize("database", ["mariadb", "mysql", "sqlite"], indirect=True)
async def test_a_statement_carries_a_bounded_number_of_bytes(bench: Bench) -> None:
    """MySQL and MariaDB refuse a statement longer than max_allowed_packet."""
    dialect: Any = bench.store.dialect
    sizes: list[int] = []
    original = dialect.insert_plain

    def counted(connection: Any, rows: Any) -> Any:
        sizes.append(sum(len(row.payload) for row in rows))
        return original(connection, rows)

    dialect.insert_plain = counted
    mebibyte = b"\x00" * (1024 * 1024)
    ids = await bench.store.insert([NewMessage("q", mebibyte) for _ in range(20)])
    assert ids == sorted(ids)
    assert len(set(ids)) == 20
    assert max(sizes) <= 4 * len(mebibyte)
    await bench.store.insert([NewMessage("q", mebibyte * 5)])
    assert sizes[-1] == 5 * len(mebibyte)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_publish_in_a_stale_read_transaction_raises_with_the_remedy(bench: Bench) -> None:
    """SQLITE_BUSY_SNAPSHOT comes at once, and only the caller can repeat the transaction."""
    async with bench.store.engine.connect() as connection:
        await connection.exec_driver_sql("BEGIN")
        await connection.execute(text("SELECT count(*) FROM message"))
        await bench.put()
        with pytest.raises(
            TransientStoreError, match=r"BEGIN IMMEDIATE \(see docs/howto/outbox.md\)"
        ):
            await bench.store.insert_in(connection, [NewMessage("q", b"")])
        await connection.rollback()
    assert len(await bench.rows()) == 1


async def test_synchronous_publishes_raise_clear_errors(bench: Bench, tmp_path: Any) -> None:
    other = create_engine(f"sqlite:///{tmp_path}/other.db")
    with other.connect() as connection, pytest.raises(PublishError, match="broker's database"):
        bench.store.insert_sync(connection, [NewMessage("q", b"")])
    with pytest.raises(PublishError, match="closed"):
        bench.store.insert_sync(connection, [NewMessage("q", b"")])
    other.dispose()


async def test_a_refused_publish_in_the_callers_transaction_is_an_error_of_the_store(
    bench: Bench,
) -> None:
    await bench.execute("DROP TABLE message")
    async with bench.store.engine.connect() as connection:
        with pytest.raises(StoreError, match="message"):
            await bench.store.insert_in(connection, [NewMessage("q", b"")])
