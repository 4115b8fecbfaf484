"""What a failed test tells, and its second chance: alone, at the end of the run."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.costs import KEEP, RECORD
from tools.servers import VARIABLES
from tools.stalled import VARIABLE as STALLS

MAX_UNSTABLE = 2
"""Tests that may pass only alone in a green run."""
MAX_AGAIN = 20
"""Where more fail than these, the run is red whatever they would do alone."""
LINES = 40
"""Of a server's log, at most."""
SECONDS_BEFORE = 5.0
"""A stop that began so long before a test may still have been felt in it."""
LIBRARIES = ("sqlalchemy", "faststream", "asyncpg", "psycopg", "aiomysql", "aiosqlite", "pyspark")


class Explained:
    """The plugin of a process that runs tests: a failure says all that there is to know of it."""

    def __init__(self) -> None:
        self._since = 0.0
        self._sizes: dict[Path, int] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        random.seed(item.nodeid)  # the same in each run
        self._since = time.time()
        self._sizes = {log: _size(log) for log in _logs().values()}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        if report.failed:
            report.sections.append(("versions", _versions()))
            report.sections += [
                (f"log of {kind}", told)
                for kind, log in _logs().items()
                if kind in item.nodeid and (told := self._new_lines(log))
            ]
            if stalls := os.environ.get(STALLS):
                report.sections.append(("stopped processes", self._stopped(Path(stalls))))
        return report

    def _new_lines(self, log: Path) -> str:
        if not log.exists():
            return "its log is gone"
        with log.open("rb") as file:
            file.seek(self._sizes.get(log, 0))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-LINES:])

    def _stopped(self, stalls: Path) -> str:
        since = self._since - SECONDS_BEFORE
        return "\n".join(
            f"after {float(at) - self._since:.1f} s: {what}"
            for at, _, what in (line.partition(" ") for line in stalls.read_text().splitlines())
            if float(at) > since
        )


def _logs() -> dict[str, Path]:
    return {
        kind: Path(os.environ[f"{name}_LOG"])
        for kind, name in VARIABLES.items()
        if f"{name}_LOG" in os.environ
    }


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _versions() -> str:
    servers = [
        f"{kind} {os.environ[f'{name}_VERSION']}"
        for kind, name in VARIABLES.items()
        if f"{name}_VERSION" in os.environ
    ]
    libraries = [f"{name} {version(name)}" for name in LIBRARIES if find_spec(name)]
    return ", ".join([f"Python {sys.version.split()[0]}", *libraries, *servers])


def passes_alone(folder: Path, nodeid: str) -> bool:
    """Run the test in a process of its own, after all others; it prints what it does.

    A skip is no pass: the server may be gone that the test has killed.
    """
    command = [sys.executable, "-m", "pytest", "-n", "0", "--no-cov", nodeid]
    with tempfile.NamedTemporaryFile("w+") as told:
        command.append(f"--junitxml={told.name}")
        environment = {k: v for k, v in os.environ.items() if k not in {KEEP, RECORD}}
        ended = subprocess.run(command, cwd=folder, env=environment, check=False)
        if ended.returncode != 0:
            return False
        suite = ET.parse(told.name).getroot().find("testsuite")
        assert suite is not None
        return (suite.get("tests"), suite.get("skipped")) == ("1", "0")


class SecondChance:
    """The plugin of the process that tells the result of several others.

    What failed runs again alone. If it all passes then, and `MAX_UNSTABLE` at most did so, the run
    is green and names them. What is no test's failure stays one: a file that cannot be collected,
    or too little coverage. While processes are stopped on purpose there is no second chance.
    """

    def __init__(self, passes: Callable[[Path, str], bool]) -> None:
        """`passes` runs a test of a folder alone."""
        self._passes = passes
        self._failed: dict[str, None] = {}
        self._failures = 0
        self._unstable: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None
            self._failures += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.TESTS_FAILED or len(self._failed) > MAX_AGAIN:
            return
        self._unstable = [
            nodeid for nodeid in self._failed if self._passes(session.config.rootpath, nodeid)
        ]
        only_tests = session.testsfailed == self._failures
        if only_tests and len(self._unstable) == len(self._failed) <= MAX_UNSTABLE:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._unstable:
            return
        terminalreporter.section("passed alone, at the end")
        for nodeid in self._unstable:
            terminalreporter.write_line(f"unstable: {nodeid}")
        for outcome in ("failed", "error"):
            reports = terminalreporter.stats.pop(outcome, [])
            for report in reports:
                name = "unstable" if report.nodeid in self._unstable else outcome
                terminalreporter.stats.setdefault(name, []).append(report)
