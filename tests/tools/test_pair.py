"""The private pair of PostgreSQL servers: when its standby counts, and what a takeover loses."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.helpers import eventually
from tools.pair import Pair, pair
from tools.private import PREFIX, CannotStartError, folder_of


@pytest.fixture
def servers() -> Iterator[Pair]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(pair())
        except CannotStartError as error:
            if os.environ.get("CI"):
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield made


def test_a_standby_that_gets_nothing_does_not_count_as_following(servers: Pair) -> None:
    servers.follow()
    servers.hold()
    with pytest.raises(CannotStartError, match="does not follow"):
        servers.follow(patience=0.5)


def test_a_takeover_loses_what_had_not_arrived_and_the_old_primary_follows(servers: Pair) -> None:
    old = servers.primary
    old.execute("CREATE TABLE orders (n int)", "INSERT INTO orders VALUES (2)")
    servers.follow()
    servers.hold()
    old.execute("INSERT INTO orders VALUES (3)")
    segment = (old.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
    assert segment in _segments()
    old.kill()
    assert not old.runs
    assert segment not in _segments()
    servers.promote()
    servers.rejoin()
    assert servers.standby is old
    for node in (servers.primary, servers.standby):
        assert node.execute("SELECT n FROM orders") == [(2,)]


def _segments() -> set[str]:
    """The shared memory of all processes that have not removed it."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    return {line.split()[1] for line in lines}


SENDER_STOPPED = """
import time
from tools.pair import pair
with pair() as servers:
    servers.hold()
    print(servers.primary.data.parent.parent, flush=True)
    time.sleep(600)
"""
SERVER_STOPPED = """
import os, signal, time
from tools.private import mariadb
with mariadb() as (_, server):
    os.kill(server._server.pid, signal.SIGSTOP)
    print(server.log.parent, flush=True)
    time.sleep(600)
"""


def _processes(folder: Path) -> list[int]:
    """Those that work in `folder`."""
    pids = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if link.readlink().is_relative_to(folder):
                pids.append(int(link.parent.name))
    return pids


@pytest.mark.parametrize(("script", "processes"), [(SENDER_STOPPED, 3), (SERVER_STOPPED, 1)])
@pytest.mark.usefixtures("servers")  # this machine gives them
async def test_nothing_stays_of_servers_that_stand_still_when_their_owner_is_killed(
    script: str, processes: int
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert folder.name.startswith(PREFIX)
    try:
        assert len(_processes(folder)) >= processes
        owner.kill()
        owner.wait()
        await eventually(lambda: not _processes(folder), timeout=120)
        with folder_of("postgres"):
            assert not folder.exists()
    finally:
        for pid in _processes(folder):
            os.kill(pid, 9)
        shutil.rmtree(folder, ignore_errors=True)
