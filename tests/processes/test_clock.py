"""The database's clock decides: a process whose own clock is an hour off does everything right."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tests.forked import ROOT
from tests.helpers import eventually
from tests.processes.conftest import Fleet
from tools.packages import install

PUBLISH = """
import asyncio, sys
from datetime import datetime, timezone
from sqlalchemy.ext.asyncio import create_async_engine
from faststream_sqlbroker import SqlBroker

async def main():
    engine = create_async_engine(sys.argv[1])
    broker = SqlBroker(engine, logger=None)
    for body in range(20):
        await broker.publish(body, "q", delay=2)
    print(datetime.now(timezone.utc).timestamp())
    await engine.dispose()

asyncio.run(main())
"""


@pytest.fixture(scope="session")
def faketime() -> str:
    """Path of libfaketime, which shifts the clock of one process."""

    def found() -> list[Path]:
        return sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))

    problem = None if found() else install("faketime")
    if not found():
        reason = f"libfaketime is missing: {problem}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(found()[0])


# In SQLite the process's clock is the database's. MariaDB and MySQL have one dialect.
@pytest.mark.parametrize(
    ("database", "shift"),
    [("postgresql", "-3600"), ("postgresql", "+3600"), ("mariadb", "+3600"), ("mysql", "-3600")],
    indirect=["database"],
)
async def test_a_shifted_process_neither_hurries_nor_lags(
    fleet: Fleet, faketime: str, shift: str
) -> None:
    env = {"LD_PRELOAD": faketime, "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    published = subprocess.run(
        [sys.executable, "-c", PUBLISH, fleet.url],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    now = await fleet.store.server.read_now()
    seen = float(published.stdout)
    assert abs(abs(seen - now.timestamp()) - 3600) < 600, "the clock was not shifted"
    rows = await fleet.rows()
    assert len(rows) == 20
    for row in rows:
        assert row["next_attempt_at"] - row["created_at"] == timedelta(seconds=2)
        assert abs(row["created_at"] - now) < timedelta(minutes=10)

    # A lease shorter than the shift: were it judged by a process's clock, it would be stolen or
    # kept for ever.
    options = {"max_workers": 20, "release_stuck_timeout": 60.0, "release_stuck_interval": 0.1}
    shifted = fleet.start("slow", env=env, **options)
    await eventually(lambda: fleet.started().get(shifted.pid))
    fleet.start("slow", **options)
    await fleet.publish(20)
    await fleet.settled(40)
    await fleet.stop()
    assert set(fleet.total().values()) == {2}, "each body was published twice and handled as often"
    for row in await fleet.rows(archive=True):
        assert row["deliveries_count"] == 1
        assert row["acquired_at"] >= row["next_attempt_at"]
        assert timedelta() <= row["last_attempt_at"] - row["acquired_at"] < timedelta(minutes=10)
        assert abs(row["archived_at"] - now) < timedelta(minutes=10)


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_shifted_release_leaves_live_leases_alone(fleet: Fleet, faketime: str) -> None:
    await fleet.publish(1)
    [row] = await fleet.claim(1, lease=600.0)
    env = {"LD_PRELOAD": faketime, "FAKETIME": "+3600", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    fleet.start(env=env, release_stuck_interval=0.05)
    await fleet.store.insert([_other()])
    await eventually(lambda: fleet.count(archive=True))
    assert (await fleet.one())["id"] == row.id
    assert (await fleet.one())["state"] == "PROCESSING"
    await fleet.stop()


def _other():
    from faststream_sqlbroker.core.rows import NewMessage

    return NewMessage("q", b"7", '{"content-type": "application/json"}')
