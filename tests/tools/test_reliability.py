"""The fault machine's table: which code each cell was run with, and which cells run again."""

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.checker import RULES
from tests.faults.records import read
from tools import reliability
from tools.reliability import (
    LABELS,
    ROOT,
    Book,
    Matrix,
    Result,
    code,
    fingerprint,
    histories,
    render,
)

CELL = reliability.ORDER[0]


@pytest.fixture(autouse=True)
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module, attribute, name in (
        (reliability, "DOCUMENT", "reliability.md"),
        (reliability, "RESULTS", "reliability.json"),
        (histories, "FOLDER", "histories"),
    ):
        monkeypatch.setattr(module, attribute, tmp_path / name)
    return tmp_path


def result(code: str = "new", seeds: tuple[int, ...] = (1, 2)) -> Result:
    made = Result(*CELL, rounds=len(seeds), seeds=list(seeds), rules=list(RULES), code=code)
    made.servers = ["PostgreSQL 15.14"]
    made.machine = "2 cores, Python 3.11.2"
    return made


def test_the_fingerprint_covers_all_that_a_run_imports() -> None:
    listing = (
        "import sys, tests.faults.run, tests.faults.worker, tests.faults.databases;"
        "files = (getattr(m, '__file__', None) for m in sys.modules.values());"
        "print(*filter(None, files), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {Path(line) for line in done.stdout.splitlines()}
    ours = {p for p in imported if p.is_relative_to(ROOT) and "site-packages" not in p.parts}
    assert ROOT / "tests" / "proxy.py" in ours
    assert ours <= set(code())


def test_the_fingerprint_changes_with_a_line_and_not_with_the_machines_own_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reliability, "ROOT", tmp_path)
    (tmp_path / "tests" / "faults").mkdir(parents=True)
    proxy = tmp_path / "tests" / "proxy.py"
    proxy.write_text("a = 1\n")
    before = fingerprint()
    (tmp_path / "tests" / "faults" / "test_short.py").write_text("b = 1\n")
    assert fingerprint() == before
    proxy.write_text("a = 2\n")
    assert fingerprint() != before


def test_the_page_says_on_what_a_cell_was_run() -> None:
    page = render([result()], "new")
    [row] = [line for line in page.splitlines() if line.startswith(f"| {LABELS[CELL[0]]} |")]
    assert "PostgreSQL 15.14" in row
    assert "code `" not in row
    assert "Code `new`" in page
    assert "2 cores, Python 3.11.2" in page


def test_the_page_marks_what_was_run_with_other_code() -> None:
    page = render([result(code="old")], "new")
    [row] = [line for line in page.splitlines() if line.startswith(f"| {LABELS[CELL[0]]} |")]
    assert "code `old`" in row


@pytest.mark.parametrize(
    ("resume", "code", "seeds"), [(True, "new", [1, 2]), (True, "old", []), (False, "new", [])]
)
def test_the_results_that_a_resumed_run_keeps(*, resume: bool, code: str, seeds: list[int]) -> None:
    Book("new").write(result(code=code))
    assert Book("new").begin(CELL, resume=resume).seeds == seeds


def test_a_run_that_did_not_end_is_run_again() -> None:
    broken = result()
    broken.unfinished = ["seed 3: TimeoutError()"]
    Book("new").write(broken)
    assert "not finished: seed 3" in reliability.DOCUMENT.read_text()
    assert Book("new").begin(CELL, resume=True).unfinished == []


async def test_every_cell_has_its_first_seed_before_any_has_its_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[int, str, str]] = []

    async def one(_matrix: Matrix, seed: int, found: Result) -> None:
        ran.append((seed, found.fault, found.kind))

    monkeypatch.setattr(Matrix, "_one", one)
    given = argparse.Namespace(runs=3, rounds=1, jobs=1, only="nothing", resume=True, minutes=1.0)
    Book("new").write(result(seeds=(1,)))
    await Matrix(given, Book("new"), {}).run()
    kinds = [kind for fault, kind in reliability.ORDER if fault == "nothing"]
    assert [seed for seed, *_ in ran] == [1] * (len(kinds) - 1) + [2] * len(kinds) + [3] * len(
        kinds
    )


async def test_a_soak_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    async def one(_matrix: Matrix, seed: int, _found: Result) -> None:
        ran.append(seed)

    monkeypatch.setattr(Matrix, "_one", one)
    given = argparse.Namespace(runs=3, rounds=1, jobs=1, only="soak", resume=False, minutes=1.0)
    await Matrix(given, Book("new"), {}).run()
    assert ran == [1] * 4


async def test_after_its_minutes_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matrix, "_one", None)
    given = argparse.Namespace(runs=3, rounds=1, jobs=2, only="", resume=False, minutes=0.0)
    await Matrix(given, Book("new"), {}).run()


async def test_an_error_of_a_run_is_recorded_and_the_next_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run_cell(
        _name: str, _place: object, folder: Path, seed: int, _rounds: int, *, timed: bool
    ) -> object:
        assert timed
        (folder / f"events-{seed}").mkdir()
        (folder / f"events-{seed}" / "1").write_text('{"at": 2}\n{"at": 1}\n')
        if seed == 1:
            raise RuntimeError("no end")
        return {rule: (["message 1 is gone"] if seed == 2 else []) for rule in RULES}

    monkeypatch.setattr(reliability, "run_cell", run_cell)
    given = argparse.Namespace(
        runs=3, rounds=1, jobs=1, only="nothing sqlite", resume=False, minutes=1.0, keep=None
    )
    await Matrix(given, Book("new"), {"sqlite": None}).run()
    [kept] = Book("new").results.values()
    assert kept.seeds == [2, 3]
    assert kept.unfinished == ["seed 1: RuntimeError('no end')"]
    assert kept.broken == Counter(dict.fromkeys(RULES, 1))
    assert kept.servers[0].startswith("SQLite 3.")
    assert "seed 2: message 1 is gone" in reliability.DOCUMENT.read_text()
    kept_histories = sorted(histories.FOLDER.iterdir())
    assert [path.name for path in kept_histories] == [
        "nothing-sqlite-2.new.jsonl.gz",
        "nothing-sqlite-3.new.jsonl.gz",
    ]
    assert [record["at"] for record in read(kept_histories[0])] == [1, 2]


def test_histories_of_other_code_are_removed(tmp_path: Path) -> None:
    (tmp_path / "1").write_text('{"at": 1}\n')
    for old_or_new in ("old", "new"):
        histories.keep(tmp_path / "1", "failover a/b, c 1", old_or_new)
    (histories.FOLDER / "nothing-sqlite-1.jsonl.gz").touch()
    histories.remove_old("new")
    assert [path.name for path in histories.FOLDER.iterdir()] == ["failover-a-b-c-1.new.jsonl.gz"]
