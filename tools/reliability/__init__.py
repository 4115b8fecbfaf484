"""The fault machine's full matrix: python -m tools.reliability [--runs 30] [--jobs 6] [--only TEXT]
[--resume] [--minutes 60].

Each cell (fault × database) runs `runs` times with seeds of its own, `rounds` faults each: first
every cell with seed 1, then with seed 2, so that a matrix that is cut short has all cells. After
each run docs/explanation/reliability.json and the table rendered from it,
docs/explanation/reliability.md, are written, and the run's history into build/histories, from which
those of other code are removed at the start. What is run replaces the cell's older result; with
`--resume` it continues it, if product and machine are still the same. Then it is measured, alone,
what a Throttle keeps of its rate (`--only "throttle rate jitter sqlite"`). Ends with 1 if any
promise was broken, a target missed, or a run did not come to its end.

With `--failover` it runs failovers instead (`tests/faults/failover`), one run at a time.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import sqlite3
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Engine, create_engine

from tests.faults.checker import RULES
from tests.faults.databases import OwnServer, Place, own_server, place_for
from tests.faults.defects import DEFECTS
from tests.faults.faults import FAULTS
from tests.faults.run import MESSAGES, run_cell
from tests.faults.second_checker import AGREE
from tools.private import CannotStartError
from tools.reliability import failover, histories, rates
from tools.servers import VARIABLES, NoServerError, server

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "explanation" / "reliability.md"
RESULTS = DOCUMENT.with_suffix(".json")
LONGEST = 600.0
"""Seconds that a run gets, and its fault's load; all its waiting has deadlines that add up to
less."""
CODE = (
    "faststream_sqlbroker/**/*.py",
    "tests/faults/**/*.py",
    "tests/__init__.py",
    "tests/forked.py",
    "tests/helpers.py",
    "tests/processes/__init__.py",
    "tests/processes/patience.py",
    "tests/processes/policy_checks.py",
    "tests/processes/policy_worker.py",
    "tests/proxy.py",
    "tools/__init__.py",
    "tools/packages.py",
    "tools/pair.py",
    "tools/private.py",
    "tools/unstable.py",
)
"""Files and folders of this repository that a run imports."""
NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}


@dataclass
class Result:
    """The results of all runs of a cell, a fault on a database."""

    fault: str
    kind: str
    rounds: int = 0
    seeds: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    """Names of the rules that were checked."""
    broken: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    """Runs that the machinery could not finish; they are no proof, and fail the matrix."""
    skipped: str = ""
    seconds: float = 0.0
    """Total duration of all runs."""
    day: str = ""
    """Day of the last run."""
    code: str = ""
    """Fingerprint of the code of the runs."""
    servers: list[str] = field(default_factory=list)
    """The databases, with their versions."""
    machine: str = ""
    """Number of cores, and versions of the libraries."""

    @property
    def length(self) -> float:
        """Average seconds of a run; infinite without runs, so that unknown cells start first."""
        return self.seconds / len(self.seeds) if self.seeds else float("inf")


def code() -> list[Path]:
    """Return the files of `CODE`, without the tests of the machine itself."""
    found = {path for pattern in CODE for path in ROOT.glob(pattern)}
    return sorted(path for path in found if not path.name.startswith("test_"))


def fingerprint() -> str:
    """Changes with every line of the product and of the machine: what is merged was run with the
    same.
    """
    made = hashlib.sha256()
    for path in code():
        made.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return made.hexdigest()[:12]


def machine() -> str:
    """Describe the processors and the libraries, on which a result depends as well."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("SQLAlchemy", "faststream"))
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {libraries}"


class Book:
    """All results, written after each change."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.results: dict[tuple[str, str], Result] = {}
        if RESULTS.exists():
            for old in json.loads(RESULTS.read_text()):
                result = Result(**{**old, "broken": Counter(old["broken"])})
                self.results[result.fault, result.kind] = result

    def begin(self, cell: tuple[str, str], *, resume: bool) -> Result:
        """Return the result to add runs to: with `resume` the stored result of the same code, else
        a new result.
        """
        old = self.results.get(cell)
        if resume and old is not None and old.code == self.code and not old.skipped:
            return replace(old, unfinished=[])
        return Result(*cell, code=self.code, machine=machine())

    def write(self, result: Result) -> None:
        """Replace the older result of the cell, and write the results and the document."""
        result.day = str(datetime.now(timezone.utc).date())
        self.results[result.fault, result.kind] = result
        _replace(
            RESULTS, "[\n" + ",\n".join(json.dumps(vars(each)) for each in self.kept()) + "\n]\n"
        )
        self.render()

    def render(self) -> None:
        """Write the document."""
        _replace(DOCUMENT, render(self.kept(), self.code))

    def kept(self) -> list[Result]:
        """Return the results of existing cells, in the order of the document."""
        return [self.results[cell] for cell in ORDER if cell in self.results]


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f"{path.name}.new")
    written.write_text(text)
    written.replace(path)


class OwnServers:
    """Servers of single cells, used again by the cell's next seed."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[tuple[OwnServer, ExitStack]]] = defaultdict(list)

    @contextlib.contextmanager
    def borrowed(self, cell: tuple[str, str]) -> Iterator[OwnServer]:
        """A server that only this fault has changed; after an error it is given up.

        Raises:
            CannotStartError: this machine does not give it.
        """
        if self._idle[cell]:
            own, stack = self._idle[cell].pop()
        else:
            stack = ExitStack()
            own = stack.enter_context(own_server(cell[1]))
        try:
            yield own
        except BaseException:
            stack.close()
            raise
        self._idle[cell].append((own, stack))

    def close(self) -> None:
        """End them."""
        for servers in self._idle.values():
            for _, stack in servers:
                stack.close()


class Matrix:
    """The runs of all requested cells."""

    def __init__(
        self, arguments: argparse.Namespace, book: Book, admin: dict[str, Engine | str | None]
    ) -> None:
        """`admin` has an administrator's engine of each database, or why there is no server."""
        self._arguments = arguments
        self._book = book
        self._admin = admin
        self._servers = OwnServers()
        self.until = time.monotonic() + 60 * arguments.minutes
        wanted = [
            cell
            for cell in ORDER
            if any(part in " ".join(cell) for part in arguments.only.split(","))
        ]
        self.results = [book.begin(cell, resume=arguments.resume) for cell in wanted]

    async def run(self) -> None:
        """Run `jobs` cells at a time; of each seed the longest cells first."""
        lengths = {cell: result.length for cell, result in self._book.results.items()}
        longest = sorted(
            self.results, key=lambda result: -lengths.get((result.fault, result.kind), float("inf"))
        )
        most = self._arguments.runs
        runs = ((seed, result) for seed in range(1, most + 1) for result in longest)
        waiting = iter(
            [
                (seed, result)
                for seed, result in runs
                if seed not in result.seeds and seed <= seeds_of(result, most)
            ]
        )

        async def one_by_one() -> None:
            for seed, result in waiting:
                if time.monotonic() > self.until:
                    return
                if not result.skipped:
                    await self._one(seed, result)

        jobs = self._arguments.jobs
        # Each run waits for the end of its processes in threads.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4 * jobs + 4))
        try:
            await asyncio.gather(*(one_by_one() for _ in range(jobs)))
        finally:
            await asyncio.to_thread(self._servers.close)

    async def _one(self, seed: int, result: Result) -> None:
        missing = self._admin.get(result.kind)
        if isinstance(missing, str):
            result.skipped = missing
            self._book.write(result)
            return
        started = time.monotonic()
        rounds = self._arguments.rounds
        try:
            # Servers and databases take seconds to make, in which the other cells must go on.
            async with in_a_thread(self._prepared(result)) as (folder, place, database):
                async with asyncio.timeout(LONGEST + FAULTS[result.fault].load):
                    found = await run_cell(result.fault, place, folder, seed, rounds, timed=True)
                name = f"{result.fault} {result.kind} {seed}"
                histories.keep(folder / f"events-{seed}", name, self._book.code)
                if any(found.values()) and self._arguments.keep is not None:
                    kept = re.sub(r"\W+", "-", name)
                    shutil.copytree(folder, self._arguments.keep / kept, dirs_exist_ok=True)
        except CannotStartError as error:
            result.skipped = str(error)
        except Exception as error:  # noqa: BLE001 - it ends this run, not the other cells; the matrix fails by it
            result.unfinished.append(f"seed {seed}: {error!r}"[:500])
        else:
            _add(result, seed, found)
            result.rounds += rounds
            result.seconds = round(result.seconds + time.monotonic() - started, 1)
            result.servers = sorted({*result.servers, database})
        self._book.write(result)
        wrong = [
            each for each in result.examples + result.unfinished if each.startswith(f"seed {seed}:")
        ]
        state = f"BROKEN {wrong}" if wrong else result.skipped or "kept"
        seconds = time.monotonic() - started
        print(f"{result.fault} / {result.kind}, seed {seed}: {state} ({seconds:.0f} s)", flush=True)

    @contextlib.contextmanager
    def _prepared(self, result: Result) -> Iterator[tuple[Path, Place, str]]:
        """A folder, an empty database, and its version.

        Raises:
            CannotStartError: this machine does not give it.
        """
        fault = FAULTS[result.fault]
        kind = result.kind
        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            )
            own = None
            if fault.own_server:
                own = stack.enter_context(self._servers.borrowed((result.fault, kind)))
            place = stack.enter_context(place_for(fault, kind, self._engine, folder, own))
            engine = self._admin[kind] if own is None else own.engine
            assert not isinstance(engine, str)  # noqa: S101 - cells without a server are not run
            yield folder, place, version_of(kind, engine)

    def _engine(self, kind: str) -> Engine:
        engine = self._admin[kind]
        assert isinstance(engine, Engine)  # noqa: S101 - cells without a server are not run
        return engine


def seeds_of(result: Result, most: int) -> int:
    """Return the number of seeds to run: one for a soak, which is long, else `most`."""
    return 1 if FAULTS[result.fault].load else most


def _add(result: Result, seed: int, found: dict[str, list[str]]) -> None:
    """Add the violations of a run to the result."""
    result.seeds.append(seed)
    result.rules = list(found)
    for rule, violations in found.items():
        result.broken[rule] += len(violations)
        result.examples += [f"seed {seed}: {violation}" for violation in violations[:2]]


T = TypeVar("T")


@contextlib.asynccontextmanager
async def in_a_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave `manager` without keeping the event loop waiting."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)


ORDER = [(name, kind) for name, fault in FAULTS.items() for kind in fault.databases]
"""All cells, in the order of the document."""
LABELS = {
    "nothing": "no fault",
    "1 nothing lost": "1 no message lost",
    "1 nothing stands still": "1 no message stuck",
    "3 stale workers change nothing": "3 no writes by stale workers",
    "nothing left behind": "no queue left behind",
    AGREE: "checkers differ",
}
"""Faults and rules whose names in the document differ from their names in the results."""


def version_of(kind: str, engine: Engine | None) -> str:
    """Return name and version of a database; without an engine, those of the SQLite library."""
    if engine is None:
        return f"{NAMES[kind]} {sqlite3.sqlite_version}"
    with engine.connect() as connection:
        numbers = connection.dialect.server_version_info or ()
    return f"{NAMES[kind]} {'.'.join(str(part) for part in numbers[:3] if isinstance(part, int))}"


def render(results: list[Result], code: str) -> str:
    """Return the document; a result of other code than `code` names its code."""
    rules = [*RULES, AGREE]
    machines = sorted({result.machine for result in results if result.machine})
    lines = [
        "# Reliability: the promises under fire",
        "",
        "Generated by `just test-faults`, which repeats all runs. Two worker processes and a",
        "publisher work on a real database while a fault strikes. Every process records its",
        "actions. Afterwards the rules of `tests/faults/checker.py`, one for each promise of the",
        f"README, check the records. A round is {MESSAGES} messages or more and one fault. The",
        "numbers count violations: 0 is a kept promise, and – is a rule that the last run did not",
        f"have yet. The same machine must catch {len(DEFECTS)} defects that are planted on purpose",
        "(`tests/faults/test_planted.py`). A seed repeats the work and the choice of times, but",
        "not the timing of the machine.",
        "",
        "A second checker reads the same records. It was written from",
        "[the promises](promises.md) and the limits of [policies](../reference/policies.md) alone,",
        "and shares no rule with the first. The two may count one fault to different promises,",
        "and see different parts of it. So it counts as a violation",
        f"(“{LABELS[AGREE]}”) if only one of them finds a broken promise, or if they",
        "find none for the same message. Where the database itself has lost commits, the second",
        "has few rules, and is not expected to find as much as the first.",
        "",
        "`just test-faults` and `just test-failover` keep the history of each run in",
        "`build/histories`, which you publish with a release. The name of a file ends with the",
        "code that you have run; histories of other code are removed. You check them by:",
        "",
        "```sh",
        "python -m tests.faults.second_checker build/histories/*.jsonl.gz",
        "```",
        "",
        "It prints one line for each broken promise, with the messages, records and times, and",
        "ends with 1 if there is one. `--rules` prints the sentence that each rule checks;",
        "`tests/faults/second_checker.py` says what a history cannot show.",
        "",
        f"Code `{code}` of the product and of the fault machine, as printed by",
        "`python -m tools.reliability --code`. Runs of other code name it. Machine:",
        f"{'; '.join(machines) or 'not recorded yet'}.",
        "",
        "| fault | database | rounds (seeds) | "
        + " | ".join(LABELS.get(rule, rule) for rule in rules)
        + " | run on |",
        "|---|---|---|" + "---:|" * len(rules) + "---|",
    ]
    lines += [_row(result, code, rules) for result in results]
    lines += failover.render(code)
    lines += rates.render(code)
    examples = [
        f"* {LABELS.get(r.fault, r.fault)} / {r.kind}, {example}"
        for r in results
        for example in r.examples[:3] + [f"not finished: {text}" for text in r.unfinished[:3]]
    ]
    return "\n".join([*lines, *(["", "## Violations", "", *examples] if examples else []), ""])


def _row(r: Result, code: str, rules: list[str]) -> str:
    ran_on = ", ".join([r.day, *r.servers, *(() if r.code == code else (f"code `{r.code}`",))])
    start = f"| {LABELS.get(r.fault, r.fault)} | {r.kind} |"
    if r.skipped:
        return f"{start} not run: {r.skipped} |" + " |" * len(rules) + f" {ran_on} |"
    counts = " | ".join(str(r.broken.get(rule, 0)) if rule in r.rules else "–" for rule in rules)
    return f"{start} {r.rounds} ({len(r.seeds)}) | {counts} | {ran_on} |"


def main() -> int:
    """Run the matrix and write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=30, help="seeds of each cell")
    parser.add_argument("--rounds", type=int, default=1, help="faults of each run")
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument(
        "--only", default="", help="cells whose name contains one of these, separated by commas"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the seeds that were run with the same code, and add to them",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start no run after this; --resume goes on",
    )
    parser.add_argument("--keep", type=Path, help="a folder for the events of broken runs")
    parser.add_argument(
        "--code", action="store_true", help="print the fingerprint of the code, and end"
    )
    parser.add_argument("--failover", action="store_true", help="run failovers instead")
    arguments = parser.parse_args()
    if arguments.code:
        print(fingerprint())
        return 0
    book = Book(fingerprint())
    histories.remove_old(book.code)
    if arguments.failover:
        failed = failover.run(
            arguments.runs, arguments.rounds, arguments.only, book.code, arguments.keep
        )
        book.render()
        return int(failed)
    with ExitStack() as stack:
        admin = {kind: _engine(stack, kind) for kind in NAMES}
        matrix = Matrix(arguments, book, admin)
        asyncio.run(matrix.run())
        missed = rates.run(admin, arguments.only, book.code, matrix.until, version_of)
    book.render()
    missing = sum(
        seeds_of(result, arguments.runs) - len(result.seeds)
        for result in matrix.results
        if not result.skipped
    )
    if missing > 0:
        print(f"{missing} runs are missing; --resume goes on")
    return int(missed or any(sum(r.broken.values()) or r.unfinished for r in matrix.results))


def _engine(stack: ExitStack, kind: str) -> Engine | str | None:
    """Return an administrator's engine, or the reason why it is missing; None for SQLite."""
    if kind not in VARIABLES:
        return None
    try:
        url = stack.enter_context(server(kind))
    except NoServerError as error:
        return str(error)
    return create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
