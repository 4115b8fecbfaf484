"""Schedules among real processes: each fire time once, under kill -9 and with wrong clocks."""

import random
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from tests.faststream.conftest import Look
from tests.forked import Process, start
from tests.helpers import eventually
from tests.processes.test_clock import faketime  # noqa: F401 - a fixture

NAMES = "function", "plain"


class Schedulers:
    """Starts processes with two schedules of every second, and reads what they published."""

    def __init__(self, url: str, folder: Path, look: Look, broker: SqlBroker) -> None:
        self.url = url
        self.folder = folder
        self.look = look
        self.broker = broker
        self.running: list[Process] = []

    def start(self, env: dict[str, str] | None = None) -> Process:
        """Start one."""
        started = start(
            "tests.processes.scheduler",
            self.url,
            str(self.folder),
            said=self.folder.parent / "said",
            env=env,
        )
        self.running.append(started)
        return started

    async def published(self) -> dict[str, list[dict[str, Any]]]:
        """The messages of each schedule."""
        rows = await self.look.rows()
        return {name: [row for row in rows if row["headers"]["schedule"] == name] for name in NAMES}

    async def more(self, count: int, timeout: float = 150) -> None:
        """Wait until each schedule has published that many more messages."""
        before = {name: len(rows) for name, rows in (await self.published()).items()}

        async def there() -> bool:
            return all(
                len(rows) >= before[name] + count for name, rows in (await self.published()).items()
            )

        await eventually(there, timeout=timeout, step=0.1)

    async def stop(self) -> None:
        """SIGTERM to all; those that were not killed end well."""
        for each in self.running:
            each.terminate()
        await eventually(
            lambda: all(each.poll() is not None for each in self.running), timeout=120, step=0.05
        )

    async def check(self) -> None:
        """Each second from the first one on has one message of each schedule, up to the last one
        that was published."""
        listed = {s.name: s for s in await self.broker.admin.schedules()}
        for name, rows in (await self.published()).items():
            times = [datetime.fromisoformat(row["headers"]["fire-time"]) for row in rows]
            assert sorted(times) == times, "in order"
            assert times == [times[0] + timedelta(seconds=n) for n in range(len(times))], name
            assert listed[name].last_fire_at == times[-1]
            for row, at in zip(rows, times, strict=True):
                assert row["created_at"] >= at, "not before its time, by the database's clock"

    def callers(self) -> int:
        """How many processes have called the function."""
        return sum(bool(path.read_text()) for path in self.folder.iterdir())


@pytest.fixture
async def schedulers(
    engine: AsyncEngine, database_url: str, tmp_path: Path
) -> AsyncIterator[Schedulers]:
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    await broker._store.server.setup()
    folder = tmp_path / "calls"
    folder.mkdir()
    schedulers = Schedulers(database_url, folder, Look(engine), broker)
    yield schedulers
    for each in schedulers.running:
        if each.poll() is None:
            each.kill()
            each.wait()


async def test_four_processes_publish_each_second_once_though_they_are_killed(
    schedulers: Schedulers,
) -> None:
    """Z9: kill -9 at any moment, and again with the ones that took their place."""
    running = [schedulers.start() for _ in range(4)]
    await schedulers.more(3)
    for _ in range(3):
        victim = running.pop(random.randrange(len(running)))
        victim.kill()
        running.append(schedulers.start())
        await schedulers.more(2)
    for each in running:  # whichever is at it
        each.kill()
    schedulers.start()
    await schedulers.more(3)
    await schedulers.stop()
    await schedulers.check()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_processes_whose_clocks_are_an_hour_off_fire_when_the_database_says(
    schedulers: Schedulers,
    faketime: str,  # noqa: F811
) -> None:
    """Alone and together. In SQLite the process's clock is the database's."""
    for shift in ("-3600", "+3600"):
        env = {"LD_PRELOAD": faketime, "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        schedulers.start(env)
        await schedulers.more(2)
    schedulers.start()
    await schedulers.more(4)
    await schedulers.stop()
    await schedulers.check()
    now = await schedulers.broker._store.server.read_now()
    for rows in (await schedulers.published()).values():
        for row in rows:
            assert abs(now - datetime.fromisoformat(row["headers"]["fire-time"])) < timedelta(
                minutes=5
            )
    assert schedulers.callers() >= 1
