"""A server stops and starts again: the log reports it once, and its end once, with the counts."""

import logging
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.database.sqlite import dialect
from faststream_sqlbroker.database.sqlite.dialect import BUSY_TIMEOUT
from faststream_sqlbroker.flow import consumer
from tests.conftest import DRIVERS
from tests.faststream.conftest import QUICK, Heard
from tests.helpers import eventually
from tools.private import CannotDownloadError, CannotStartError, Process, mariadb, mysql, postgresql

SERVERS = {"postgresql": postgresql, "mariadb": mariadb, "mysql": mysql}
LEAST = 6
"""Failures of the loops of one kind: three of them, each more than once."""
ENDED = re.compile(r"the database works again, after \d+\.\d s: (\d+) failures \((.*)\)")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Process]]:
    """A server of our own: its kind, its URL, and its process."""
    kind = request.param
    try:
        with SERVERS[kind]() as (url, process):
            yield kind, url, process
    except CannotStartError as error:
        if os.environ.get("CI") and not isinstance(error, CannotDownloadError):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
async def own(server: tuple[str, str, Process]) -> AsyncIterator[AsyncEngine]:
    """An engine on an empty database of that server."""
    kind, url, _ = server
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE outage"))
    admin.dispose()
    engine = create_async_engine(
        make_url(url).set(drivername=f"{kind}+{DRIVERS[kind]}", database="outage")
    )
    yield engine
    await engine.dispose()


def told(heard: Heard) -> list[str]:
    return [r.getMessage() for r in heard.records if r.levelno >= logging.WARNING]


async def busy(engine: AsyncEngine, logger: logging.Logger, handled: list[Any]) -> SqlBroker:
    """A broker with loops of every kind."""
    broker = SqlBroker(
        engine,
        logger=logger,
        presence_interval=0.1,
        graceful_timeout=1.0,
    )
    await broker.create_tables()
    options = {**QUICK, "wakeup": "auto", "release_stuck_interval": 0.1}

    for queue in ("a", "b", "c"):

        @broker.subscriber(queue, **options)
        async def handle(body: Any) -> None:
            handled.append(body)

    broker.publish_on_schedule("s", "* * * * * *", "elsewhere", "x")
    await broker.start()
    await broker.publish(1, "a")
    await eventually(lambda: handled == [1])
    return broker


async def after(broker: SqlBroker, heard: Heard, handled: list[Any], loop: str, least: int) -> None:
    """The outage is over: what was told of it."""
    await eventually(lambda: ENDED.search("\n".join(told(heard))), timeout=90)
    await broker.publish(2, "b")
    await eventually(lambda: handled == [1, 2])
    lines = told(heard)
    assert len(lines) == 2, "\n".join(lines)
    begin, end = lines
    assert " failed, and tries again" in begin
    found = ENDED.fullmatch(end)
    assert found is not None, end
    counts = {
        part.rpartition(" ")[0]: int(part.rpartition(" ")[2]) for part in found[2].split(", ")
    }
    assert counts[loop] >= least
    assert sum(counts.values()) == int(found[1])


@pytest.mark.parametrize("server", SERVERS, indirect=True)
async def test_an_outage_of_the_server_is_logged_in_two_lines(
    server: tuple[str, str, Process], own: AsyncEngine, logger: logging.Logger, heard: Heard
) -> None:
    handled: list[Any] = []
    process = server[2]
    broker = await busy(own, logger, handled)
    try:
        assert told(heard) == []
        process.crash()
        lasting = broker._wakeups.outages._outages
        await eventually(lambda: "" in lasting and lasting[""].counts["fetch loop"] >= LEAST)
        process.start()
        await after(broker, heard, handled, "fetch loop", LEAST)
    finally:
        await broker.stop()


@asynccontextmanager
async def locked(path: str) -> AsyncIterator[None]:
    """SQLite's counterpart of a server that is away."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other:

        def begun() -> bool:
            with suppress(
                sqlite3.OperationalError
            ):  # another writes, and needs the event loop to end
                other.execute("BEGIN IMMEDIATE")
            return other.in_transaction

        await eventually(begun)
        yield
        other.execute("ROLLBACK")


async def test_a_file_that_is_locked_for_long_is_logged_in_two_lines(
    tmp_path: Path, logger: logging.Logger, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading goes on, so that an idle fetch loop does not notice."""
    handled: list[Any] = []
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{tmp_path / 'a.db'}", connect_args={"timeout": 0.1}
    )
    broker = await busy(engine, logger, handled)
    try:
        async with locked(str(tmp_path / "a.db")):
            # For which each try waits.
            monkeypatch.setattr(dialect, "BUSY_TIMEOUT", 0.1)
            lasting = broker._wakeups.outages._outages
            await eventually(lambda: "" in lasting and lasting[""].counts["heartbeat loop"] >= 2)
            monkeypatch.setattr(dialect, "BUSY_TIMEOUT", BUSY_TIMEOUT)
        await after(broker, heard, handled, "heartbeat loop", 2)
    finally:
        await broker.stop()
        await engine.dispose()


async def test_a_stop_without_outcomes_logs_nothing_of_them(
    engine: AsyncEngine, logger: logging.Logger, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little time there was for the last flush."""
    broker = SqlBroker(engine, logger=logger, graceful_timeout=1.0)
    await broker.create_tables()

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any) -> None: ...

    await broker.start()
    monkeypatch.setattr(consumer, "FINAL_FLUSH_TIMEOUT", 0.0)
    await broker.stop()
    assert not heard.texts("outcomes could not be written")
