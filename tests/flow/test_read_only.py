"""A server that turned read-only and back: sessions opened in between stay read-only, and the pool
is full of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from faststream_sqlbroker.core.outcome import Ack, Nack, Release
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Unit
from faststream_sqlbroker.core.settle import SettleRules
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from faststream_sqlbroker.flow.deliver.transactional import TransactionalDeliveries
from faststream_sqlbroker.subscriber.options import make_settings
from tests.contract.conftest import done
from tests.flow.conftest import Rig
from tests.helpers import eventually

READ_ONLY = {
    "postgresql": "SET default_transaction_read_only = on",
    "mariadb": "SET SESSION TRANSACTION READ ONLY",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
    "sqlite": "PRAGMA query_only = 1",
}
POOL = 5
QUICK: dict[str, Any] = {"max_fetch_interval": 0.05, "flush_interval": 0.01}


class Server:
    """While it is `read_only`, each session that is opened there is so for ever."""

    def __init__(self, engine: AsyncEngine, kind: str) -> None:
        self.read_only = False
        self.opened = 0
        self._engine = engine

        @event.listens_for(engine.sync_engine, "connect")
        def opened(connection: Any, _record: Any) -> None:
            self.opened += 1
            if self.read_only:
                cursor = connection.cursor()
                cursor.execute(READ_ONLY[kind])
                cursor.close()
                connection.commit()

    async def turned(self) -> None:
        """It turned read-only and back: the pool holds only connections opened in between."""
        await self._engine.dispose()
        self.read_only = True
        connections = [await self._engine.connect() for _ in range(POOL)]
        for connection in connections:
            await connection.close()
        self.read_only = False


@pytest.fixture
def server(engine: AsyncEngine, database: str, rig: Rig) -> Server:
    return Server(engine, database)


async def count_of(rig: Rig, number: int) -> bool:
    return await rig.count(archive=True) == number


async def test_each_operation_recovers_by_itself(rig: Rig, server: Server) -> None:
    """Its first answer says it, and everything opened before is closed: one repeat is enough."""
    store = rig.store
    await rig.put(2)
    [first, second] = await rig.claim(2)
    token = uuid4()
    operations: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.insert([NewMessage("q", b"1")]),
        lambda: store.insert([NewMessage("q", b"1", dedup_id="d")]),
        lambda: rig.claim(1),
        lambda: store.renew([(first.id, first.lease_token)], 60.0),
        lambda: store.settle([done(first)]),
        lambda: store.settle([done(second, unit=Unit([NewMessage("out", b"")]))]),
        lambda: store.locks.acquire("key", token, 60.0),
        lambda: store.schedules.remove("none", "the test"),
        lambda: store.live_subscribers.pause("other", None, {}, "channel"),
        lambda: store.release_stuck(["q"], 10),
    ]
    for operation in operations:
        await server.turned()
        await operation()
    assert len(await rig.rows(archive=True)) == 2
    assert len(await rig.rows()) == 3


async def test_a_read_only_server_is_tried_twice_and_named_in_the_error(
    rig: Rig, server: Server
) -> None:
    await server.turned()
    server.read_only = True
    opened = server.opened
    with pytest.raises(TransientStoreError, match=r"(?i)read.?only"):
        await rig.store.insert([NewMessage("q", b"1")])
    assert server.opened - opened <= 2
    server.read_only = False
    await rig.store.insert([NewMessage("q", b"1")])


async def test_a_connection_that_works_is_kept(rig: Rig, server: Server) -> None:
    await server.turned()
    await rig.store.insert([NewMessage("q", b"first")])
    for _ in range(2 * POOL):
        await rig.store.server.read_now()  # each checks the next connection of the pool out
    opened = server.opened
    for n in range(10):
        await rig.store.insert([NewMessage("q", b"%d" % n)])
    assert server.opened == opened


async def test_publishers_recover_together_or_alone(rig: Rig, server: Server) -> None:
    """On PostgreSQL by the connection that is kept between publishes, too."""

    async def publish(n: int) -> None:
        await rig.store.insert([NewMessage("q", b"%d" % n)])

    for _ in range(2):
        await server.turned()
        await asyncio.gather(*(publish(n) for n in range(30)))
        for n in range(20):
            await publish(n)
    assert len(await rig.rows()) == 100


async def test_subscribers_go_on(rig: Rig, server: Server) -> None:
    """They run while the server is read-only, so that their own connections are from that time."""
    handled = asyncio.Event()
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        handled.set()
        await go_on.wait()
        await rig.ack(row)

    await rig.put(20)
    consumer = rig.consumer(handle, **QUICK)
    await consumer.start()
    await handled.wait()
    await server.turned()
    server.read_only = True
    go_on.set()
    await eventually(lambda: not consumer.healthy)
    server.read_only = False
    await eventually(lambda: count_of(rig, 20))
    await rig.put(5)
    await eventually(lambda: count_of(rig, 25))
    await eventually(lambda: consumer.healthy)
    assert {row["deliveries_count"] for row in await rig.rows(archive=True)} == {1}


async def test_a_handler_that_could_not_write_gets_another_connection(
    rig: Rig, server: Server
) -> None:
    """MySQL, MariaDB and SQLite let it lock its row, so that only the handler finds out."""

    async def handle(rows: list[ClaimedMessage]) -> None:
        transaction = current_transaction.get()
        assert transaction is not None
        try:
            await transaction.connection.execute(
                text("UPDATE message SET last_error = 'by the handler'")
            )
        except DBAPIError as error:
            rows[0].record_outcome(Nack(error=error))
        else:
            rows[0].record_outcome(Ack())

    inflight = Inflight()
    settings = make_settings("q", {"transactional": True})
    deliveries = TransactionalDeliveries(
        rig.store, inflight, settings, rig.log, stopping=lambda: False
    )
    await rig.put(2)
    first, second = await rig.claim(2)
    inflight.add([first, second])
    await server.turned()
    assert await deliveries.deliver([first], handle, Settlements(SettleRules(), rig.log)) == [first]
    assert isinstance(first.outcome, Nack | Release)
    assert await deliveries.deliver([second], handle, Settlements(SettleRules(), rig.log)) == []
    assert (await rig.one(archive=True))["last_error"] == "by the handler"


async def test_the_applications_transaction_is_left_alone(
    rig: Rig, server: Server, engine: AsyncEngine, database: str
) -> None:
    """The application that opened it ends it, and decides what becomes of its connection."""
    await server.turned()
    async with engine.connect() as connection:
        raw = (await connection.get_raw_connection()).driver_connection
        with pytest.raises(TransientStoreError, match=r"(?i)read.?only"):
            await rig.store.insert_in(connection, [NewMessage("q", b"1")])
        assert not connection.invalidated
        await connection.rollback()
        assert (await connection.execute(text("SELECT 1"))).scalar_one() == 1
        assert (await connection.get_raw_connection()).driver_connection is raw
    assert await rig.rows() == []


@pytest.mark.parametrize("first", ["write", "read and publish"])
async def test_the_applications_pool_fails_once(
    rig: Rig, server: Server, engine: AsyncEngine, database: str, first: str
) -> None:
    """Whatever finds out: the pool replaces its connections for the application, too."""
    if database == "sqlite":
        pytest.skip("no server of SQLite is read-only")

    async def write(connection: AsyncConnection) -> None:
        if first == "write":
            await connection.execute(text("UPDATE message SET last_error = 'x'"))
        else:
            await connection.execute(text("SELECT 1"))
            await rig.store.insert_in(connection, [NewMessage("q", b"1")])

    for _ in range(2):
        await server.turned()
        failures = 0
        for _ in range(2 * POOL):
            try:
                async with engine.begin() as connection:
                    await write(connection)
            except (DBAPIError, TransientStoreError):
                failures += 1
        assert failures == 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_listener_moves_when_a_server_was_found_read_only(rig: Rig, server: Server) -> None:
    """It may listen on a server that gets no publishes any more."""
    if not rig.store.can_listen:
        pytest.skip("this driver cannot listen")
    async with rig.store.listen("channel", lambda _payload: None, asyncio.Event()) as alive:
        await alive(True)
        await server.turned()
        await rig.store.insert([NewMessage("q", b"1")])
        with pytest.raises(TransientStoreError, match="read-only"):
            await alive(True)
    async with rig.store.listen("channel", lambda _payload: None, asyncio.Event()) as alive:
        await alive(True)
