"""The helper that stops processes of a run."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tools.stalled import Process, draw

ROOT = Path(__file__).parents[2]
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
TREE = [
    Process(2, 1, ("sh", "tools/test.sh")),
    Process(3, 1, ("/x/python", "-m", "tools.servers", "run")),
    Process(4, 3, ("/usr/bin/postgres", "-D", "data")),
    Process(5, 4, ("postgres: writer",)),
    Process(6, 4, ("postgres: me me 127.0.0.1 idle",)),
    Process(10, 3, ("/c/ld-linux-x86-64.so.2", "--library-path", "/c/lib", "/c/mysqld", "--x")),
    Process(7, 2, ("/x/python", "-u", "-c", WORKER)),
    Process(8, 7, ("java", "-cp", "x")),
    Process(9, 7, ("/x/python", "-m", "service")),
]


def test_each_kind_is_stopped_and_nothing_that_only_waits() -> None:
    chance = random.Random(1)
    drawn = Counter(draw(TREE, chance)[0].pid for _ in range(200))
    assert set(drawn) == {4, 7, 8, 9, 10}
    assert min(drawn.values()) > 200 / 8 / 2


def test_a_server_is_stopped_with_all_its_processes() -> None:
    servers = [p for p in TREE if p.pid in {4, 5, 6}]
    assert [p.pid for p in draw(servers, random.Random(1))] == [4, 5, 6]


def test_a_command_goes_on_after_the_stops_and_its_exit_code_is_told() -> None:
    """A child that outlives its parent is stopped, too."""
    slow = "import time\nfor _ in range(60): time.sleep(0.1)\nprint('went on')"
    orphan = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {slow!r}])\n"
        "child.wait()\nsys.exit(3)"
    )
    command = [sys.executable, "-m", "tools.stalled", "--seed", "1", "--every", "0.5", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", orphan],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "went on" in done.stdout
    assert "seed 1: stopped " in done.stderr
    assert "child" in done.stderr
