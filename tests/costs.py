"""What a run of the tests costs: CPU seconds by folder, and the slowest tests.

The seconds are of the tests' processes and of all that these start, also of what still runs. Not
among them: the servers of `tools.servers`, which tells their seconds when it stops them; a process
of tests that has crashed; what runs again alone, which tells its own.
"""

import json
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import scheduling

SLOWEST = 10
TICKS = os.sysconf("SC_CLK_TCK")
KEEP = "SQLBROKER_TEST_COSTS"
"""Names a file for all figures."""
RECORD = "SQLBROKER_RECORD_TIMES"
"""If set, the seconds of each file are kept for the order of later runs."""
OUTSIDE = "(start, collection and end)"


def cpu_seconds() -> float:
    """CPU seconds so far of this process, of its ended children, and of all that descend from it
    and still run."""
    own = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return own + _of_descendants()


def _of_descendants() -> float:
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name, in parentheses, may hold spaces.
            words = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(entry.name)
        parents[pid] = int(words[1])
        seconds[pid] = sum(map(int, words[11:15])) / TICKS

    def descends(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return sum(spent for pid, spent in seconds.items() if descends(pid))


class Costs:
    """The plugin of a process that runs tests, and of the one that tells the result."""

    def __init__(self, config: pytest.Config) -> None:
        # Workers tell their own.
        self._shares = bool(config.getoption("numprocesses", None))
        self._file = OUTSIDE
        self._cpu = 0.0
        self._since = time.monotonic()
        self.cpu: Counter[str] = Counter()
        """CPU seconds by file."""
        self.wall: Counter[str] = Counter()
        """Seconds by file."""
        self._tests: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = item.nodeid.partition("::")[0]
        if file != self._file:
            self._change_to(file)
        return (yield)

    def _change_to(self, file: str) -> None:
        cpu = time.process_time() if self._shares else cpu_seconds()
        now = time.monotonic()
        # What has lost its parent is no longer counted.
        self.cpu[self._file] += max(0.0, cpu - self._cpu)
        self.wall[self._file] += now - self._since
        self._file, self._cpu, self._since = file, cpu, now

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._change_to(OUTSIDE)
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["costs"] = (dict(self.cpu), dict(self.wall))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        cpu, wall = getattr(node, "workeroutput", {}).get("costs", ({}, {}))
        self.cpu.update(cpu)
        self.wall.update(wall)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        folders: Counter[str] = Counter()
        for file, seconds in self.cpu.items():
            folders[file if file == OUTSIDE else "/".join(file.split("/")[:2])] += seconds
        terminalreporter.section("CPU seconds")
        for folder, seconds in folders.most_common():
            terminalreporter.write_line(f"{seconds:8.1f} {folder}")
        terminalreporter.write_line(f"{sum(folders.values()):8.1f} in all")
        terminalreporter.section(f"slowest {SLOWEST} tests, in seconds")
        slowest = sorted(self._tests.items(), key=lambda test: -test[1])[:SLOWEST]
        for name, seconds in slowest:
            terminalreporter.write_line(f"{seconds:8.1f} {name}")
        if path := os.environ.get(KEEP):
            Path(path).write_text(
                json.dumps({"cpu": self.cpu, "wall": self.wall, "tests": self._tests}, indent=0)
            )
        if RECORD in os.environ and exitstatus == pytest.ExitCode.OK:
            self.wall.pop(OUTSIDE, None)
            scheduling.record(self.wall)
