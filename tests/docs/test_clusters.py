"""The page on clusters: its addresses, HAProxy's configuration and the handler of errors, in front
of a PostgreSQL and its standby."""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NoReturn

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker, evict_read_only_connections
from tests.docs.reader import ROOT
from tests.helpers import eventually
from tests.proxy import Proxy
from tools.pair import USER, Pair, pair
from tools.private import CannotDownloadError, CannotStartError, folder_of, free_port, running
from tools.unstable import DownloadError, Packages, unpacked

PAGE = (ROOT / "docs" / "howto" / "clusters.md").read_text()
HAPROXY = Packages("haproxy-trixie", "trixie", ("haproxy",), {"sbin/haproxy": {}}, 10)
DRIVERS = ("asyncpg", "psycopg")
POOL = 5
WRITES = 10


def cannot(error: Exception) -> NoReturn:
    """Skip a test that this machine cannot run; fail in CI, unless a download is impossible."""
    if os.environ.get("CI") and not isinstance(error, (DownloadError, CannotDownloadError)):
        pytest.fail(str(error))
    pytest.skip(str(error))


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    try:
        with pair() as made:
            yield made
    except CannotStartError as error:
        cannot(error)


def url_of(driver: str, *ports: int, more: str = "") -> str:
    """The page's URL, with servers of this machine for its hosts."""
    [query] = re.findall(r'hosts = "(.+)"\n', PAGE)
    hosts = [f"127.0.0.1:{port}" for port in ports]
    names = re.findall(r"db\d:5432", query)
    assert len(names) == len(hosts)
    for name, host in zip(names, hosts, strict=True):
        query = query.replace(name, host)
    return f"postgresql+{driver}://{USER}@/postgres?{query}{more}"


async def port_behind(engine: AsyncEngine) -> int:
    """The port of the server to which a connection of `engine` leads."""
    async with engine.connect() as connection:
        return int((await connection.execute(text("SELECT inet_server_port()"))).scalar_one())


@pytest.mark.parametrize("driver", DRIVERS)
async def test_hosts_in_the_url_lead_to_the_server_that_takes_writes(
    servers: Pair, driver: str
) -> None:
    ports = [node.port for node in servers.nodes]
    for order in (ports, ports[::-1]):
        broker = SqlBroker(url_of(driver, *order), logger=None)
        try:
            await broker.create_tables()
            assert await port_behind(broker.engine) == servers.primary.port
            assert await broker.publish("x", "q")
            assert await broker.ping(60.0)
        finally:
            await broker.stop()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of a host that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_psycopg_leaves_a_host_that_does_not_answer(servers: Pair, silent_port: int) -> None:
    assert "`&connect_timeout=3`" in PAGE
    url = url_of("psycopg", silent_port, servers.primary.port, more="&connect_timeout=3")
    engine = create_async_engine(url)
    assert await port_behind(engine) == servers.primary.port
    await engine.dispose()


async def test_asyncpg_has_one_limit_for_all_hosts(servers: Pair, silent_port: int) -> None:
    url = url_of("asyncpg", silent_port, servers.primary.port)
    engine = create_async_engine(url, connect_args={"timeout": 3})
    with pytest.raises(TimeoutError):
        await port_behind(engine)


@pytest.mark.parametrize("evicting", [False, True], ids=["alone", "evicting"])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_pool_leaves_a_standby_after_one_failure(
    servers: Pair, driver: str, evicting: bool
) -> None:
    """Its connections were opened while the proxy led to the standby, and stay there."""
    proxy = Proxy("127.0.0.1", servers.standby.port)
    await proxy.start()
    url = f"postgresql+{driver}://{USER}@127.0.0.1:{proxy.port}/postgres"
    engine = create_async_engine(url, pool_size=POOL, max_overflow=0)
    if evicting:
        evict_read_only_connections(engine)
    failures = list[str]()
    try:
        connections = [await engine.connect() for _ in range(POOL)]
        for connection in connections:
            await connection.execute(text("SELECT 1"))
            await connection.close()
        proxy.lead_to(servers.primary.port)
        for _ in range(WRITES):
            try:
                async with engine.begin() as connection:
                    await connection.execute(text("INSERT INTO probe VALUES (1)"))
            except DBAPIError as error:
                failures.append(str(error))
        assert len(failures) == (1 if evicting else WRITES)
        assert all("read-only" in failure for failure in failures)
    finally:
        await engine.dispose()
        await proxy.stop()


@asynccontextmanager
async def patroni(is_primary: dict[str, bool], name: str) -> AsyncIterator[int]:
    """The port of what answers as Patroni does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        assert asked.startswith(b"OPTIONS /primary ")
        status = b"200 OK" if is_primary[name] else b"503 Service Unavailable"
        writer.write(b"HTTP/1.0 " + status + b"\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_haproxy_ends_the_connections_to_a_server_that_is_no_longer_primary(
    servers: Pair,
) -> None:
    [configuration] = re.findall(r'```text title="haproxy.cfg"\n(.+?)```', PAGE, re.DOTALL)
    try:
        program = str(unpacked(HAPROXY) / "haproxy")
    except DownloadError as error:
        cannot(error)
    nodes = {"db1": servers.primary, "db2": servers.standby}
    is_primary = {"db1": True, "db2": False}
    port = free_port()
    configuration = configuration.replace("bind :5000", f"bind 127.0.0.1:{port}")
    async with AsyncExitStack() as stack:
        for name, node in nodes.items():
            rest = await stack.enter_async_context(patroni(is_primary, name))
            line = f"server {name} {name}:5432 check port 8008"
            assert line in configuration
            here = f"server {name} 127.0.0.1:{node.port} check port {rest}"
            configuration = configuration.replace(line, here)
        folder, become = stack.enter_context(folder_of("haproxy"))
        file = folder / "haproxy.cfg"
        file.write_text(configuration)
        file.chmod(0o644)
        command = [program, "-db", "-f", str(file)]
        stack.enter_context(running(command, become, folder, port))
        url = f"postgresql+asyncpg://{USER}@127.0.0.1:{port}/postgres"
        engine = create_async_engine(url)
        stack.push_async_callback(engine.dispose)

        async def leads_to(name: str) -> bool:
            try:
                return await port_behind(engine) == nodes[name].port
            except (OSError, DBAPIError):
                return False

        await eventually(lambda: leads_to("db1"))
        async with engine.connect() as held:
            await held.execute(text("SELECT 1"))
            is_primary.update(db1=False, db2=True)

            async def has_ended() -> bool:
                try:
                    await held.execute(text("SELECT 1"))
                except DBAPIError:
                    return True
                return False

            await eventually(has_ended)
        await eventually(lambda: leads_to("db2"))
