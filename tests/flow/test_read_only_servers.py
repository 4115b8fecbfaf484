"""A real server that an operator turns read-only and back, or that another one is taken for; a
private one, as the setting is everybody's."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker, evict_read_only_connections
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import PublishError, TransientStoreError
from faststream_sqlbroker.flow.fleet import write_path
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.conftest import DRIVERS
from tests.helpers import eventually
from tools.private import STARTERS, CannotStartError

SESSION = {"postgresql": "SELECT pg_backend_pid()"}
ASYNC_DRIVERS = {
    "postgresql": ("asyncpg", "psycopg"),
    "mariadb": ("aiomysql", "asyncmy"),
    "mysql": ("aiomysql", "asyncmy"),
}


@pytest.fixture(scope="module", params=list(STARTERS))
def private(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The administrator's engine of a private server."""
    try:
        with STARTERS[request.param]() as (url, _process):
            admin = create_engine(url, isolation_level="AUTOCOMMIT")
            yield admin
            admin.dispose()
    except CannotStartError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def run(admin: Engine, *statements: str) -> None:
    with admin.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))


def turn(admin: Engine, *, read_only: bool) -> None:
    if admin.dialect.name == "postgresql":
        run(
            admin,
            f"ALTER SYSTEM SET default_transaction_read_only = {read_only}",
            "SELECT pg_reload_conf()",
        )
    else:
        run(admin, f"SET GLOBAL read_only = {int(read_only)}")


@pytest.fixture
async def application(private: Engine) -> AsyncIterator[AsyncEngine]:
    """An engine of a user who may only publish, and the tables."""
    kind = private.dialect.name
    run(private, "DROP DATABASE IF EXISTS app", "CREATE DATABASE app")
    url = private.url.set(drivername=f"{kind}+{DRIVERS[kind]}", database="app")
    owner = create_async_engine(url)
    async with owner.begin() as connection:
        await connection.run_sync(build_tables(SqlBrokerSchemaConfig()).metadata.create_all)
        if kind == "postgresql":
            who = "publisher"
            await connection.execute(text("DROP ROLE IF EXISTS publisher"))
            await connection.execute(text("CREATE ROLE publisher LOGIN"))
        else:
            who = "publisher@'127.0.0.1'"
            await connection.execute(text(f"CREATE USER IF NOT EXISTS {who} IDENTIFIED BY ''"))
        table = "message" if kind == "postgresql" else "app.message"
        await connection.execute(text(f"GRANT INSERT, SELECT (id) ON {table} TO {who}"))
    await owner.dispose()
    engine = create_async_engine(url.set(username="publisher", password=None), pool_size=2)
    yield engine
    await engine.dispose()
    run(private, "DROP DATABASE app")


async def test_who_may_only_publish_knows_that_the_server_is_read_only(
    private: Engine, application: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is published in the meantime."""
    monkeypatch.setattr(write_path, "FRESH", 0.0)
    broker = SqlBroker(application, logger=None)

    async def refused() -> bool:
        return not await broker.ping(60.0)

    try:
        assert await broker.ping(60.0)
        assert await broker.publish("x", "q")
        turn(private, read_only=True)
        await eventually(refused)
        said = (await broker.admin.health()).writes
        assert said is not None
        assert "readonly" in said.lower().replace("-", "")
        turn(private, read_only=False)
        await eventually(lambda: broker.ping(60.0))
    finally:
        turn(private, read_only=False)
        await broker.stop()


async def test_a_synchronous_standby_that_is_away(
    private: Engine, application: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every COMMIT waits, and every look is answered."""
    if private.dialect.name != "postgresql":
        pytest.skip("only PostgreSQL waits for a standby without end")
    monkeypatch.setattr(write_path, "FRESH", 0.0)
    broker = SqlBroker(application, logger=None, statement_timeout=2.0)
    setting = "ALTER SYSTEM SET synchronous_standby_names = '{}'"

    async def refused() -> bool:
        return not await broker.ping(1.0)

    async def said() -> bool:
        known = (await broker.admin.health()).writes
        return known is not None and "the answer to the COMMIT was lost" in known

    try:
        assert await broker.ping(60.0)
        run(private, setting.format("missing"), "SELECT pg_reload_conf()")
        await eventually(refused)
        await eventually(said)
        run(private, setting.format(""), "SELECT pg_reload_conf()")
        await eventually(lambda: broker.ping(60.0))
    finally:
        run(private, setting.format(""), "SELECT pg_reload_conf()")
        await broker.stop()


@pytest.fixture
def owners_url(private: Engine) -> URL:
    """Of a user who has no right to write past read_only, as an application's should not."""
    user = private.url.username
    run(private, "DROP DATABASE IF EXISTS app", "CREATE DATABASE app")
    if private.dialect.name != "postgresql":
        user = "app"
        run(
            private,
            "CREATE USER IF NOT EXISTS app@'127.0.0.1' IDENTIFIED BY ''",
            "GRANT ALL ON app.* TO app@'127.0.0.1'",
        )
    return private.url.set(username=user, database="app")


async def session_of(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        statement = text(SESSION.get(engine.dialect.name, "SELECT connection_id()"))
        return int((await connection.execute(statement)).scalar_one())


@pytest.mark.parametrize("number", [0, 1], ids=["first driver", "second driver"])
async def test_an_application_reconnects(private: Engine, owners_url: URL, number: int) -> None:
    """With each driver: the first refused write evicts its connection."""
    kind = private.dialect.name
    driver = ASYNC_DRIVERS[kind][number]
    engine = create_async_engine(owners_url.set(drivername=f"{kind}+{driver}"), pool_size=1)
    evict_read_only_connections(engine)

    async def write(statement: str = "INSERT INTO x VALUES (1)") -> None:
        async with engine.begin() as connection:
            await connection.execute(text(statement))

    async def refused() -> bool:
        try:
            await write()
        except DBAPIError:
            return True
        return False

    try:
        await write("CREATE TABLE x (n INTEGER)")
        first = await session_of(engine)
        turn(private, read_only=True)
        await eventually(refused)  # PostgreSQL's sessions hear of it a moment later
        assert await session_of(engine) != first
        turn(private, read_only=False)

        async def written() -> bool:
            return not await refused()

        await eventually(written)
    finally:
        turn(private, read_only=False)
        await engine.dispose()


async def test_the_broker_recovers_and_reconnects(private: Engine, owners_url: URL) -> None:
    kind = private.dialect.name
    url = owners_url.set(drivername=f"{kind}+{DRIVERS[kind]}")
    engine = create_async_engine(url, pool_size=1, max_overflow=0)
    store = Store(engine, build_tables(SqlBrokerSchemaConfig()))

    async def works() -> bool:
        try:
            await store.insert([NewMessage("q", b"")])
        except TransientStoreError:
            return False
        return True

    async def refused() -> bool:
        return not await works()

    try:
        await store.server.create_tables()
        assert await works()
        first = await session_of(engine)
        turn(private, read_only=True)
        await eventually(refused)  # PostgreSQL's sessions hear of it a moment later
        await eventually(lambda: store.access.ping(5.0))
        turn(private, read_only=False)
        await eventually(works)
        assert await session_of(engine) != first
    finally:
        turn(private, read_only=False)
        await engine.dispose()


async def test_another_server_with_a_database_of_that_name_is_refused(private: Engine) -> None:
    """Also if both are given as lists of hosts, and so without a host in the URL itself."""
    kind = private.dialect.name
    engines = []
    driver = f"{kind}+{DRIVERS[kind]}"
    with STARTERS[kind]() as (other, _process):
        for server in (private.url, make_url(other)):
            admin = create_engine(server, isolation_level="AUTOCOMMIT")
            run(admin, "DROP DATABASE IF EXISTS app", "CREATE DATABASE app")
            admin.dispose()
            url = server.set(drivername=driver, database="app")
            if kind == "postgresql":
                hosts = {"host": f"{server.host}:{server.port}"}
                url = URL.create(driver, server.username, database="app", query=hosts)
            engines.append(create_async_engine(url))
        store = Store(engines[0], build_tables(SqlBrokerSchemaConfig()))
        await store.server.create_tables()
        try:
            async with engines[1].connect() as connection:
                with pytest.raises(PublishError, match="broker's database"):
                    await store.insert_in(connection, [NewMessage("q", b"")])
            again = create_async_engine(engines[0].url)
            async with again.begin() as connection:
                await store.insert_in(connection, [NewMessage("q", b"")])
            await again.dispose()
        finally:
            for engine in engines:
                await engine.dispose()
