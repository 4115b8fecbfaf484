"""What keeps the processes of a command together: they end with it, and with its parent."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.helpers import eventually
from tools import subreaper

LEAVES = """
setsid sleep 600 &
(setsid sh -c 'kill -STOP $$' &)
echo ready
"""
"""One that leaves the session, and one that has no parent any more and stands still."""
PARENT = f"""
import ctypes, signal, subprocess, sys
die_too = lambda: ctypes.CDLL(None).prctl(1, signal.SIGINT)
command = [sys.executable, {subreaper.__file__!r}, *sys.argv[1:]]
subprocess.Popen(command, preexec_fn=die_too).wait()
"""
"""Runs the script as `tools.private` runs servers."""


@pytest.fixture
def mark() -> Iterator[str]:
    """A word in the environment of all processes of a test, which end with it."""
    word = f"subreaper-{uuid4().hex}"
    yield word
    for pid in _marked(word):
        os.kill(pid, 9)


def _marked(word: str) -> list[int]:
    """The processes, but those that have ended and wait for their parent to see it."""
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word.encode() in environment.read_bytes():
                pids.append(int(environment.parent.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return pids


def _run(mark: str, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, "sh", "-c", script]
    environment = {**os.environ, "MARK": mark}
    made = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    return made


async def test_all_ends_with_the_parent(mark: str) -> None:
    parent = _run(mark, f"{LEAVES}exec sleep 600")
    assert len(_marked(mark)) >= len(("parent", "script", "command", "apart", "still"))
    parent.kill()
    parent.wait()
    await eventually(lambda: not _marked(mark), timeout=60)


async def test_all_ends_with_the_command(mark: str) -> None:
    parent = _run(mark, f"{LEAVES}exit 3")
    parent.wait(60)
    await eventually(lambda: not _marked(mark), timeout=60)
