"""Sessions whose client fell silent in the middle of a statement: no time limit of PostgreSQL's
ends them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy import make_url, text

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database import dead_sessions
from faststream_sqlbroker.database.store import Store
from tests.clock import ShiftedTime
from tests.flow.conftest import Rig
from tests.helpers import eventually
from tools.golden_sql import FOLDER as STATEMENTS

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
IDLE = 30.0
"""Seconds for which a session of the broker may idle."""
BRIEFLY = "SET LOCAL idle_in_transaction_session_timeout = '300ms'"
Connect = Callable[[], Awaitable[Any]]


@pytest.fixture
async def connect(database_url: str) -> AsyncIterator[Connect]:
    """Makes connections of the driver's own."""
    url = make_url(database_url).set(drivername="postgresql")
    made = []

    async def connect() -> Any:
        made.append(await asyncpg.connect(url.render_as_string(hide_password=False)))
        return made[-1]

    yield connect
    for connection in made:
        connection.terminate()


@pytest.fixture
async def raw(connect: Connect) -> Any:
    """One of them."""
    return await connect()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> ShiftedTime:
    """By which it is known how long a session has been silent."""
    time = ShiftedTime()
    monkeypatch.setattr(dead_sessions, "monotonic", time.monotonic)
    return time


@pytest.fixture
def store(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Store:
    """It looks whenever it is asked."""
    monkeypatch.setattr(dead_sessions, "CHECK_INTERVAL", 0.0)
    return rig.store


async def fall_silent(raw: Any, locking: str, limit: float = IDLE) -> int:
    """In a transaction like the broker's, which may idle for `limit` seconds, and has run
    `locking`: ask for a parse, and say no more."""
    await raw.execute("BEGIN")
    marking = (STATEMENTS / "postgresql" / "idle_limit.sql").read_text()
    await raw.execute(marking.replace(":limit", f"'{round(limit * 1000)}ms'"))
    await raw.execute(locking)
    await raw.prepare("DELETE FROM message WHERE id = $1")
    return int(raw.get_server_pid())


async def is_seen(store: Store) -> bool:
    """Whether the silent session was found; it takes a moment until it is seen to wait."""
    assert await store.dead_sessions.end_dead_sessions() == []
    return bool(store.dead_sessions._first_seen)


async def is_there(store: Store, pid: int) -> bool:
    async with store.engine.connect() as connection:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
        return bool((await connection.execute(query, {"pid": pid})).scalar_one())


@pytest.mark.parametrize(
    "locking",
    [
        "SELECT * FROM message FOR UPDATE",
        "INSERT INTO message_policy_state (scope, key) VALUES ('queue', 'q')",
    ],
    ids=["message", "state of policies"],
)
async def test_a_dead_session_is_ended_and_its_rows_are_unlocked(
    store: Store, connect: Connect, time: ShiftedTime, locking: str
) -> None:
    await store.insert([NewMessage("q", b"x")])

    async def limited_by_the_server() -> int | None:
        # It ends the session if we stand still before we ask.
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            return await fall_silent(await connect(), f"{locking}; {BRIEFLY}")
        return None

    pid = await eventually(limited_by_the_server)
    assert pid is not None
    await eventually(lambda: is_seen(store))
    await asyncio.sleep(0.9)
    assert await is_there(store, pid), "PostgreSQL does what we do"
    time.shift = IDLE
    assert await store.dead_sessions.end_dead_sessions() == [pid]
    await eventually(lambda: gone(store, pid))
    async with store.engine.begin() as connection:
        found = await connection.execute(text("SELECT id FROM message FOR UPDATE NOWAIT"))
        assert found.scalars().all() == [1]


async def gone(store: Store, pid: int) -> bool:
    return not await is_there(store, pid)


async def test_a_session_that_goes_on_is_left_alone(
    store: Store, raw: Any, time: ShiftedTime
) -> None:
    """The same session waits again, for something else."""
    await store.insert([NewMessage("q", b"x")])
    pid = await fall_silent(raw, "SELECT * FROM message FOR UPDATE")
    await eventually(lambda: is_seen(store))
    await raw.prepare("DELETE FROM message WHERE id = $1 AND queue = $2")
    time.shift = 2 * IDLE
    assert await store.dead_sessions.end_dead_sessions() == []
    assert await is_there(store, pid)


async def test_a_session_without_locks_on_our_tables_is_left_alone(
    store: Store, raw: Any, time: ShiftedTime
) -> None:
    await raw.execute("CREATE TABLE other (id int)")
    await raw.execute("BEGIN")
    await raw.execute("INSERT INTO other VALUES (1)")
    await raw.prepare("DELETE FROM other WHERE id = $1")
    await eventually(lambda: is_seen(store))
    time.shift = 2 * IDLE
    assert await store.dead_sessions.end_dead_sessions() == []
    assert await is_there(store, raw.get_server_pid())


async def test_a_session_that_may_idle_longer_is_left_alone_as_long(
    store: Store, raw: Any, time: ShiftedTime
) -> None:
    """As a handler with a long lease: its own limit counts, not that of who looks."""
    await store.insert([NewMessage("q", b"x")])
    pid = await fall_silent(raw, "SELECT * FROM message FOR UPDATE", limit=10 * IDLE)
    await eventually(lambda: is_seen(store))
    time.shift = 2 * IDLE
    assert await store.dead_sessions.end_dead_sessions() == []
    assert await is_there(store, pid)
    time.shift = 11 * IDLE
    assert await store.dead_sessions.end_dead_sessions() == [pid]


async def test_transactions_of_the_broker_are_marked(store: Store) -> None:
    """A session may be silent for as long as it may idle; a handler may ask for longer."""
    marks = text(
        "SELECT objid::bigint FROM pg_locks "
        "WHERE locktype = 'advisory' AND pid = pg_backend_pid() ORDER BY 1"
    )
    [message_id] = await store.insert([NewMessage("q", b"x")])
    token = uuid4()
    [row] = await store.claim_one(message_id, ["q"], 60, token)
    async with store.transaction() as transaction:
        assert await transaction.lock([(row.id, token)], 60) == {row.id}
        assert (await transaction.connection.execute(marks)).scalars().all() == [60_000]
        assert await transaction.hold([(row.id, token)], 90) == {row.id}
        assert (await transaction.connection.execute(marks)).scalars().all() == [60_000, 90_000]
    found = await store._database.run(lambda c: c.execute(marks).scalars().all())
    assert found == [round(IDLE * 1000)]


async def test_an_application_that_takes_its_time_is_left_alone(
    store: Store, raw: Any, time: ShiftedTime
) -> None:
    """asyncpg's `prepare` leaves the session in the same wait until the statement is used, however
    much later that is."""
    await raw.execute("BEGIN")
    await raw.execute("INSERT INTO message (queue, payload) VALUES ('q', 'x')")
    statement = await raw.prepare("DELETE FROM message WHERE id = $1")
    await eventually(lambda: is_seen(store))
    time.shift = 2 * IDLE
    assert await store.dead_sessions.end_dead_sessions() == []
    await statement.fetch(0)
    await raw.execute("COMMIT")


async def test_a_copy_reads_from_its_client_all_the_time(
    store: Store, raw: Any, time: ShiftedTime
) -> None:
    await raw.execute("CREATE TABLE other (id int)")
    go_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"1\n"
        await go_on.wait()

    await raw.execute("BEGIN")
    await raw.execute("INSERT INTO message (queue, payload) VALUES ('q', 'x')")
    pid = raw.get_server_pid()
    copying = asyncio.create_task(raw.copy_to_table("other", source=slowly()))
    await eventually(lambda: waits(store, pid))
    assert await store.dead_sessions.end_dead_sessions() == []
    time.shift = 2 * IDLE
    assert await store.dead_sessions.end_dead_sessions() == []
    go_on.set()
    await copying
    await raw.execute("COMMIT")


async def waits(store: Store, pid: int) -> bool:
    """Whether a COPY waits for its client."""
    query = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE pid = :pid AND query LIKE 'COPY%' AND wait_event = 'ClientRead'"
    )
    async with store.engine.connect() as connection:
        return bool((await connection.execute(query, {"pid": pid})).scalar_one())


async def test_a_user_without_the_right_to_end_sessions_is_not_refused(
    store: Store, raw: Any
) -> None:
    """Nothing is found, as nothing could be done."""
    engine = store.engine
    async with engine.begin() as connection:
        await connection.execute(
            text("REVOKE EXECUTE ON FUNCTION pg_terminate_backend(integer, bigint) FROM PUBLIC")
        )
        await connection.execute(text("CREATE ROLE sqlbroker_no_end"))
    try:
        await store.insert([NewMessage("q", b"x")])
        await fall_silent(raw, "SELECT * FROM message FOR UPDATE")
        await eventually(lambda: is_seen(store))
        find = store.dead_sessions._find_waits
        async with engine.connect() as connection:
            assert len(await connection.run_sync(find)) == 1
            await connection.execute(text("SET ROLE sqlbroker_no_end"))
            assert await connection.run_sync(find) == set()
            await connection.rollback()
    finally:
        async with engine.begin() as connection:
            with suppress(Exception):
                await connection.execute(text("DROP ROLE sqlbroker_no_end"))
            await connection.execute(
                text("GRANT EXECUTE ON FUNCTION pg_terminate_backend(integer, bigint) TO PUBLIC")
            )


async def test_a_subscriber_claims_the_rows_of_a_dead_session(
    store: Store, rig: Rig, raw: Any, time: ShiftedTime
) -> None:
    await store.insert([NewMessage("q", b"x")])
    await fall_silent(raw, "SELECT * FROM message FOR UPDATE")
    consumer = rig.consumer(rig.ack, max_fetch_interval=0.05, release_stuck_interval=0.1)
    await consumer.start()
    await eventually(lambda: store.dead_sessions._first_seen)
    time.shift = 2 * IDLE
    await eventually(lambda: rig.rows(archive=True))
    await consumer.stop()
    assert len(rig.logged("ended database sessions")) == 1
