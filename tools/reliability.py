"""The fault machine's full matrix: python -m tools.reliability [--runs 50] [--rounds 1] [--jobs 6] [--only TEXT] [--resume].

Each cell (fault × database) runs `runs` times with seeds of its own, `rounds` faults each; the result is the
table in docs/reliability.md, rendered from docs/reliability.json, which is written after each run. What is run
replaces the cell's older result; with `--resume` it continues it, if product and machine are still the same.
Ends with 1 if any promise was broken, or a run did not come to its end.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from sqlalchemy import Engine, create_engine

from tests.faults.checker import RULES
from tests.faults.databases import place_for
from tests.faults.defects import DEFECTS
from tests.faults.faults import FAULTS
from tests.faults.run import MESSAGES, run_cell
from tools.private import CannotStartError
from tools.servers import VARIABLES, NoServerError, server

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "reliability.md"
RESULTS = DOCUMENT.with_suffix(".json")


@dataclass
class Result:
    """What came of one cell."""

    fault: str
    kind: str
    rounds: int = 0
    seeds: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    """What was checked."""
    broken: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    """Runs that the machinery could not bring to an end: they prove nothing, and fail the matrix."""
    skipped: str = ""
    seconds: float = 0.0
    """What all runs took."""
    day: str = ""
    """When it was run."""
    code: str = ""
    """What `fingerprint` was then."""

    @property
    def length(self) -> float:
        """Seconds of a run; an unknown one may be the longest."""
        return self.seconds / len(self.seeds) if self.seeds else float("inf")


def fingerprint() -> str:
    """Changes with every line of the product and of the machine: what is merged was run with the same."""
    made = hashlib.sha256()
    for folder in ("faststream_sqlbroker", "tests/faults"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            made.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return made.hexdigest()[:12]


async def run(result: Result, admin: Callable[[str], Engine], runs: int, rounds: int) -> None:
    """The runs of one cell that it does not have yet."""
    for seed in sorted(set(range(1, runs + 1)) - set(result.seeds)):
        stack, started = ExitStack(), time.monotonic()
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            wanted = place_for(FAULTS[result.fault], result.kind, admin, folder)
            # Servers and databases take seconds to make, in which the other cells must go on.
            place = await asyncio.to_thread(stack.enter_context, wanted)
            found = await run_cell(result.fault, place, folder, seed, rounds)
        except CannotStartError as error:
            result.skipped = str(error)
            merge(result)
            return
        except Exception as error:  # noqa: BLE001 - it ends this run, not the other cells; the matrix fails by it
            result.unfinished.append(f"seed {seed}: {error!r}"[:500])
            continue
        finally:
            await asyncio.to_thread(stack.close)
        result.rules = list(found)
        result.seeds.append(seed)
        result.rounds += rounds
        result.seconds += round(time.monotonic() - started, 1)
        for rule, violations in found.items():
            result.broken[rule] += len(violations)
            result.examples += [f"seed {seed}: {violation}" for violation in violations[:2]]
        merge(result)  # kept, whatever becomes of the rest


async def matrix(arguments: argparse.Namespace, admin: dict[str, Engine | str]) -> list[Result]:
    """Every cell, `jobs` at a time, the longest ones first."""
    code, before = fingerprint(), known()
    cells = []
    for name, kind in ORDER:
        if not any(part in f"{name} {kind}" for part in arguments.only.split(",")):
            continue
        old = before.get((name, kind), Result(name, kind))
        resumed = arguments.resume and old.code == code and not old.skipped
        made = replace(old, unfinished=[]) if resumed else Result(name, kind)
        made.code = code
        cells.append((old.length, made))
    cells.sort(key=lambda cell: -cell[0])
    places = asyncio.Semaphore(arguments.jobs)

    def engine_of(kind: str) -> Engine:
        engine = admin[kind]
        assert isinstance(engine, Engine)  # noqa: S101 - those without a server are not run
        return engine

    async def one(result: Result) -> None:
        async with places:
            started, missing = time.monotonic(), admin.get(result.kind)
            if isinstance(missing, str):
                result.skipped = missing
                merge(result)
            else:
                await run(result, engine_of, arguments.runs, arguments.rounds)
            wrong = result.examples[:3] + result.unfinished[:3]
            state = result.skipped or (f"BROKEN {wrong}" if wrong else "kept")
            print(f"{result.fault} / {result.kind}: {state} ({time.monotonic() - started:.0f} s)", flush=True)

    results = [result for _, result in cells]
    await asyncio.gather(*(one(result) for result in results))
    return results


ORDER = [(name, kind) for name, fault in FAULTS.items() for kind in fault.databases]
"""All cells, as the document has them."""


def known() -> dict[tuple[str, str], Result]:
    """The results in `RESULTS`, of cells that there still are."""
    if not RESULTS.exists():
        return {}
    kept = [Result(**{**old, "broken": Counter(old["broken"])}) for old in json.loads(RESULTS.read_text())]
    return {(result.fault, result.kind): result for result in kept if (result.fault, result.kind) in ORDER}


def merge(result: Result) -> None:
    """Put `result` in the place of the older one in `RESULTS`."""
    result.day = str(datetime.now(timezone.utc).date())
    results = {**known(), (result.fault, result.kind): result}
    kept = [
        {**vars(results[cell]), "broken": dict(results[cell].broken)} for cell in ORDER if cell in results
    ]
    written = RESULTS.with_suffix(".new")
    written.write_text("[\n" + ",\n".join(json.dumps(each) for each in kept) + "\n]\n")
    written.replace(RESULTS)


def render(results: list[Result]) -> str:
    """The document."""
    rules = list(RULES)
    lines = [
        "# Reliability: the promises under fire",
        "",
        "Generated by `just test-faults`, which repeats it. Real processes (two workers and a publisher) work on a real",
        "database while a fault strikes; every process records what it does, and one rule for each promise of the README",
        f"reads the history afterwards (`tests/faults/checker.py`). A round is {MESSAGES} messages or more and one fault. Numbers are",
        f"violations: 0 is a kept promise. The same machine must catch {len(DEFECTS)} defects that are planted on purpose",
        "(`tests/faults/test_planted.py`); – is a rule that the cell's last run did not have yet. Seeds repeat the work",
        "and the choice of moments, not the machine's own timing.",
        "",
        "| fault | database | rounds (seeds) | " + " | ".join(rules) + " | run on |",
        "|---|---|---|" + "---:|" * len(rules) + "---|",
    ]
    for r in results:
        if r.skipped:
            lines.append(
                f"| {r.fault} | {r.kind} | not run: {r.skipped} |" + " |" * len(rules) + f" {r.day} |"
            )
            continue
        counts = " | ".join(str(r.broken.get(rule, 0)) if rule in r.rules else "–" for rule in rules)
        lines.append(f"| {r.fault} | {r.kind} | {r.rounds} ({len(r.seeds)}) | {counts} | {r.day} |")
    examples = [
        f"* {r.fault} / {r.kind}, {example}"
        for r in results
        for example in r.examples[:3] + [f"not finished: {text}" for text in r.unfinished[:3]]
    ]
    return "\n".join([*lines, *(["", "## Violations", "", *examples] if examples else []), ""])


def main() -> int:
    """Run the matrix and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="seeds of each cell")
    parser.add_argument("--rounds", type=int, default=1, help="faults of each run")
    parser.add_argument("--jobs", type=int, default=6, help="cells at a time")
    parser.add_argument(
        "--only", default="", help="cells whose name contains one of these, separated by commas"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the seeds that were run with the same code, and add to them",
    )
    arguments = parser.parse_args()
    with ExitStack() as stack:
        admin = {kind: _engine(stack, kind) for kind in VARIABLES}
        results = asyncio.run(matrix(arguments, admin))
    DOCUMENT.write_text(render([known()[cell] for cell in ORDER if cell in known()]))
    return int(any(sum(r.broken.values()) or r.unfinished for r in results))


def _engine(stack: ExitStack, kind: str) -> Engine | str:
    """An administrator's, or why there is none."""
    try:
        url = stack.enter_context(server(kind))
    except NoServerError as error:
        return str(error)
    return create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)


if __name__ == "__main__":
    sys.exit(main())
