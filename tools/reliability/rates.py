"""What a Throttle keeps of its rate: each disturbance on each database, three runs, one at a time;
and the part of the document about it.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from tests.faults.databases import fresh_database
from tests.faults.rates import LEAST, LEAST_WITH_LAG, PER, RATE, Case, Kept, measure

RESULTS = Path(__file__).parents[2] / "docs" / "explanation" / "throttle_rates.json"
RUNS = 3
REPEATS = 2
"""Maximum repetitions of a case's runs because the machine was too busy."""
UNDISTURBED = "undisturbed"
"""Name in the document of the disturbance `none`."""
Admin = Mapping[str, Engine | str | None]
"""An administrator's engine of each database, or the reason why it is missing."""


def run(
    admin: Admin, only: str, code: str, until: float, version: Callable[[str, Any], str]
) -> bool:
    """Measure the cases whose name contains one of `only`, until a moment (monotonic); whether a
    target was missed, or a case did not come to its end.
    """
    failed = False
    for how in LEAST:
        for kind, engine in admin.items():
            wanted = any(part in f"throttle rate {how} {kind}" for part in only.split(","))
            if not wanted or isinstance(engine, str):
                continue
            if time.monotonic() > until:
                print(f"throttle rate {how} {kind}: not measured, the time is over")
                continue
            runs, problem = _runs(how, kind, engine)
            day = datetime.now(timezone.utc).date()
            found = {
                "disturbance": how,
                "kind": kind,
                "runs": [vars(each) for each in runs],
                "problem": problem,
                "ran_on": f"{day}, {version(kind, engine)}, load {os.getloadavg()[0]:.0f}",
                "code": code,
            }
            kept = [each for each in _read() if (each["disturbance"], each["kind"]) != (how, kind)]
            lines = sorted(json.dumps(each) for each in [*kept, found])
            RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
            print(_row(found, code), flush=True)
            failed = failed or bool(_problems(found))
    return failed


def _runs(how: str, kind: str, engine: Engine | None) -> tuple[list[Kept], str]:
    """Return the measured runs, and the reason if some are missing."""
    runs: list[Kept] = []
    for _ in range(RUNS + REPEATS):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            events = Path(folder, "events")
            events.mkdir()
            try:
                with fresh_database(kind, lambda _: engine, Path(folder)) as url:  # type: ignore[arg-type, return-value]
                    one = asyncio.run(measure(url, events, how))
            except Exception as error:  # noqa: BLE001 - it ends this case, not the others; the command fails by it
                return runs, repr(error)[:500]
        runs += [one] if one.is_conclusive(how) else []
        if len(runs) == RUNS:
            return runs, ""
    return runs, "the plain queue did not keep up either"


def _read() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def _came_to(case: Mapping[str, Any]) -> Case:
    return Case.of([Kept(**each) for each in case["runs"]])


def _problems(case: Mapping[str, Any]) -> list[str]:
    unfinished = [f"not finished: {case['problem']}"] if case["problem"] else []
    missed = _came_to(case).missed(case["disturbance"]) if case["runs"] else []
    return unfinished + [f"missed: {each}" for each in missed]


def render(code: str, cases: Iterable[Mapping[str, Any]] | None = None) -> list[str]:
    """Lines of the document; `cases` are those of the file unless they are given. Those of other
    code than `code` name it.
    """
    rows = [_row(case, code) for case in (_read() if cases is None else cases)]
    targets = ", ".join(f"{how} {least}" for how, least in LEAST.items())
    return [
        "",
        "## How much of its rate a Throttle keeps",
        "",
        f"`Throttle({RATE}, per={PER:g})` with four workers, next to a plain queue with 16;",
        f"medians of {RUNS} runs. Blocked: the event loop is blocked for 0.3 s at a time.",
        "Jitter: each statement takes 20 to 150 ms longer. Stopped: the process is stopped for",
        "half of each second. The lag is the delay of recent starts in the Throttle's log.",
        "A run that misses its rate while the plain queue has less than 10 starts a second is",
        f"repeated, at most {REPEATS} times in a case. The load is the machine's. Targets: of N",
        f"{targets.replace('none', UNDISTURBED)};",
        f"of N / (per + lag) {LEAST_WITH_LAG}; never more than {RATE} starts in a period.",
        "",
        "| disturbance | database | of N | with lag | lag | over | plain | targets | run on |",
        "|---|---|---:|---:|---:|---:|---:|---|---|",
        *rows,
    ]


def _row(case: Mapping[str, Any], code: str) -> str:
    figures = "– | – | – | – | –"
    if case["runs"]:
        kept = _came_to(case)
        figures = (
            f"{kept.share:.3f} | {kept.share_with_lag:.3f} | {kept.lag:.2f} s | {kept.over} | "
            f"{kept.plain:.0f} a second"
        )
    targets = "; ".join(f"**{each}**" for each in _problems(case)) or "reached"
    other = "" if case["code"] == code else f", code `{case['code']}`"
    disturbance = case["disturbance"].replace("none", UNDISTURBED)
    name = f"| {disturbance} | {case['kind']} |"
    return f"{name} {figures} | {targets} | {case['ran_on']}{other} |"
