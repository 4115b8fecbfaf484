"""A failed test's second chance, what it tells, and what a run costs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.costs import KEEP, RECORD, SLOWEST
from tests.failures import MAX_AGAIN, SecondChance
from tools.servers import VARIABLES
from tools.stalled import VARIABLE as STALLS

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.costs import Costs
from tests.failures import Explained, SecondChance, passes_alone

def pytest_configure(config):
    config.pluginmanager.register(Costs(config))
    config.pluginmanager.register(Explained())
    if config.getoption("numprocesses"):
        config.pluginmanager.register(SecondChance(passes_alone))
"""
UNSTABLE = """
import os, time, pytest

def test_good():
    until = time.process_time() + 1
    while time.process_time() < until:
        pass

@pytest.mark.parametrize("database", ["postgresql"])
def test_unstable(database):
    with open(os.environ["{log}"], "a") as file:
        file.write("ERROR of now")
    assert "PYTEST_XDIST_WORKER" not in os.environ

@pytest.fixture
def unready():
    assert "PYTEST_XDIST_WORKER" not in os.environ

def test_set_up(unready):
    pass
"""


@pytest.mark.parametrize(
    ("unstable", "broken", "green"),
    [(1, 0, True), (2, 0, True), (3, 0, False), (1, 1, False), (0, 1, False)],
)
def test_a_run_is_green_if_two_at_most_passed_only_alone(
    unstable: int, broken: int, green: bool
) -> None:
    names = [f"unstable{n}" for n in range(unstable)] + [f"broken{n}" for n in range(broken)]
    assert _exit_code(names) == (pytest.ExitCode.OK if green else pytest.ExitCode.TESTS_FAILED)


@pytest.mark.parametrize(
    "code", [pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.OK]
)
def test_other_ends_of_a_run_stay_what_they_are(code: pytest.ExitCode) -> None:
    assert _exit_code(["unstable"], code) == code


def test_where_very_many_fail_none_runs_again() -> None:
    ran: list[str] = []
    names = [f"unstable{n}" for n in range(MAX_AGAIN + 1)]
    assert _exit_code(names, ran=ran) == pytest.ExitCode.TESTS_FAILED
    assert ran == []


@pytest.mark.parametrize("names", [[], ["unstable"]])
def test_what_is_no_tests_failure_stays_one(names: list[str]) -> None:
    """A file that cannot be collected, or too little coverage."""
    assert _exit_code(names, others=1) == pytest.ExitCode.TESTS_FAILED


def _exit_code(
    names: list[str],
    code: pytest.ExitCode = pytest.ExitCode.TESTS_FAILED,
    ran: list[str] | None = None,
    others: int = 0,
) -> int:
    """What a run ends with in which the tests `names` failed."""

    def passes(_: Path, name: str) -> bool:
        if ran is not None:
            ran.append(name)
        return name.startswith("unstable")

    chance = SecondChance(passes)
    for name in names:
        report: Any = SimpleNamespace(failed=True, nodeid=name)
        chance.pytest_runtest_logreport(report)
    chance.pytest_runtest_logreport(SimpleNamespace(failed=False, nodeid="good"))
    config = SimpleNamespace(rootpath=Path())
    failed = len(names) + others
    session: Any = SimpleNamespace(exitstatus=code, config=config, testsfailed=failed)
    chance.pytest_sessionfinish(session, code)
    return int(session.exitstatus)


def test_a_run_tells_what_was_unstable_and_why_and_what_it_cost(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real run, whose tests fail only next to others: one in its set-up."""
    name = VARIABLES["postgresql"]
    log, stalls = tmp_path / "log", tmp_path / "stalls"
    log.write_text("ERROR of before\n")
    stalls.write_text("1.0 server 1 long ago\n9999999999.0 worker 2 python\n")
    for variable in VARIABLES.values():
        monkeypatch.delenv(f"{variable}_LOG", raising=False)
    monkeypatch.setenv(f"{name}_LOG", str(log))
    monkeypatch.setenv(f"{name}_VERSION", "PostgreSQL 99")
    monkeypatch.setenv(STALLS, str(stalls))
    for variable in (KEEP, RECORD, "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest(CONFTEST)
    folder = pytester.path / "tests" / "one"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(UNSTABLE.format(log=f"{name}_LOG"))

    result = pytester.runpytest_subprocess("-n", "1", "tests")

    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1, "unstable": 2}
    assert sorted(line for line in result.outlines if line.startswith("unstable: ")) == [
        "unstable: tests/one/test_it.py::test_set_up",
        "unstable: tests/one/test_it.py::test_unstable[postgresql]",
    ]
    result.stdout.fnmatch_lines(
        [
            "*versions*",
            "Python *sqlalchemy *PostgreSQL 99*",
            "*log of postgresql*",
            "ERROR of now",
            "*stopped processes*",
            "after * s: worker 2 python",
            "*CPU seconds*",
            "* tests/one",
            f"*slowest {SLOWEST} tests*",
            "* tests/one/test_it.py::test_good",
        ]
    )
    result.stdout.no_fnmatch_line("ERROR of before")
    result.stdout.no_fnmatch_line("*long ago*")
    # What ran again alone told its own.
    spent = [float(line.split()[0]) for line in result.outlines if line.endswith(" tests/one")]
    assert max(spent) >= 1
