"""broker.lock among real processes: exclusive, taken over from the dead by the database's clock."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import LockNotAcquiredError, SqlBroker
from tests.forked import Process, start
from tests.helpers import eventually
from tests.processes.test_clock import faketime  # noqa: F401 - a fixture
from tests.quick_tables import TABLES

EACH = 25


class Lockers:
    """Starts processes that lock."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.running: list[Process] = []

    def start(self, what: str, count: int = 0, env: dict[str, str] | None = None) -> Process:
        """Start one."""
        started = start(
            "tests.processes.locker",
            self.url,
            str(self.folder),
            what,
            str(count),
            said=self.folder / "said",
            env=env,
        )
        self.running.append(started)
        return started

    def fences(self) -> list[int]:
        """All that were given out, process by process."""
        files = [path for path in self.folder.iterdir() if path.name.isdigit()]
        return [int(line) for path in files for line in path.read_text().split()]


@pytest.fixture
async def broker(engine: AsyncEngine) -> SqlBroker:
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    await broker._store.server.setup()
    return broker


@pytest.fixture
def lockers(broker: SqlBroker, database_url: str, tmp_path: Path) -> Iterator[Lockers]:
    folder = tmp_path / "locks"
    folder.mkdir()
    (folder / "number").write_text("0")
    lockers = Lockers(database_url, folder)
    yield lockers
    for each in lockers.running:
        if each.poll() is None:
            each.kill()
            each.wait()


async def test_four_processes_count_without_losing_one(lockers: Lockers) -> None:
    """Z5: a number in a file, which nothing else guards."""
    running = [lockers.start("count", EACH) for _ in range(4)]
    await eventually(
        lambda: all(each.poll() is not None for each in running), timeout=240, step=0.1
    )
    assert [each.returncode for each in running] == [0] * 4
    assert int((lockers.folder / "number").read_text()) == 4 * EACH
    assert sorted(lockers.fences()) == list(range(1, 4 * EACH + 1))


async def test_a_killed_holder_keeps_the_lock_for_its_lease_and_no_longer(
    lockers: Lockers, broker: SqlBroker
) -> None:
    """Z5: kill -9; while it lived, the lease was renewed."""
    holder = lockers.start("hold", 600)
    await eventually(lockers.fences)
    [first] = await broker.admin.locks()

    async def renewed() -> bool:
        [held] = await broker.admin.locks()
        return held.held_until > first.held_until

    await eventually(renewed, step=0.1)
    holder.kill()
    holder.wait()
    [held] = await broker.admin.locks()
    assert held.worker.endswith(f":{holder.pid}")
    with pytest.raises(LockNotAcquiredError):
        async with broker.lock("number", wait=0):
            pass
    # The rest of its lease would take ten minutes.
    soon = await broker._store.server.read_now() + timedelta(seconds=1)
    state = TABLES.policy_state
    async with broker.engine.begin() as connection:
        await connection.execute(update(state).values(lease_expires_at=soon))
    async with broker.lock("number", wait=120) as lock:
        assert lock.fence == 2
        [ours] = await broker.admin.locks()
        assert ours.acquired_at >= soon


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_processes_with_clocks_an_hour_off_neither_take_nor_lose_locks(
    lockers: Lockers,
    broker: SqlBroker,
    faketime: str,  # noqa: F811
) -> None:
    """The database's clock decides. In SQLite the process's is the database's."""
    late, early = (
        {"LD_PRELOAD": faketime, "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        for shift in ("-3600", "+3600")
    )
    async with broker.lock("number", lease="10m") as lock:
        thieves = [lockers.start("count", 1, env) for env in (late, early)]
        names = {str(thief.pid) for thief in thieves}
        await eventually(lambda: names <= {path.name for path in lockers.folder.iterdir()})
        await asyncio.sleep(1)
        assert lockers.fences() == []
        await lock.extend()
    await eventually(lambda: all(thief.poll() == 0 for thief in thieves), timeout=120)
    assert sorted(lockers.fences()) == [2, 3]
    # By its own clock the lease of the one that is late is over before it begins.
    lockers.start("hold", 600, env=late)
    await eventually(lambda: len(lockers.fences()) == 3)
    with pytest.raises(LockNotAcquiredError):
        async with broker.lock("number", wait=1):
            pass
