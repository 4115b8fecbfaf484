"""Failovers: what comes of each of them in some runs, one at a time, how long recovery takes, and
the part of the document about them.
"""

import asyncio
import json
import re
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.faults.checker import RULES
from tests.faults.failover import FAILOVERS
from tests.faults.failover.run import Seen, run_failover
from tools.private import CannotStartError
from tools.reliability import histories

RESULTS = Path(__file__).parents[2] / "docs" / "explanation" / "failover.json"
TARGET = 2.0
"""Seconds from the moment at which a new server takes writes until a worker starts a message."""
LONGEST = 400.0
"""Seconds that a round gets; all its waiting has deadlines that add up to less."""
COLUMNS = ("2 message_id of one message", "8 no FAILED without a cause")
"""Rules that have a column of their own."""


def run(runs: int, rounds: int, only: str, code: str, keep: Path | None) -> bool:
    """Run the failovers whose name contains one of `only`, and write what came of each; whether a
    promise was broken, a target missed, or a run did not come to its end. Events of such runs are
    copied to `keep`.
    """
    parts = only.casefold().split(",")
    chosen = [name for name in FAILOVERS if any(part in name.casefold() for part in parts)]
    if not chosen:
        print(f"--only must be a part of {', '.join(FAILOVERS)}; got {only!r}")
    failed = not chosen
    for name in chosen:
        found = _new(name, code)
        for seed in range(1, runs + 1):
            started = time.monotonic()
            before = len(_problems(found))
            _run_once(found, seed, rounds, keep)
            if not found["skipped"]:
                _write(found)
            state = "; ".join(_problems(found)[before:]) or found["skipped"] or "kept"
            seconds = time.monotonic() - started
            print(f"{name}, seed {seed}: {state} ({seconds:.0f} s)", flush=True)
            if found["skipped"]:
                break
        print(_row(found, code), flush=True)
        failed = failed or bool(found["skipped"] or _problems(found))
    return failed


def _new(name: str, code: str) -> dict[str, Any]:
    return {
        "name": name,
        "seeds": [],
        "rounds": 0,
        "broken": {},
        "examples": [],
        "unfinished": [],
        "skipped": "",
        "lost": 0,
        "forgotten": 0,
        "recoveries": {},
        "server": "",
        "day": "",
        "code": code,
    }


def _run_once(found: dict[str, Any], seed: int, rounds: int, keep: Path | None) -> None:
    """Add one run to `found`."""
    name = found["name"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with FAILOVERS[name].topology() as topology:
                found["server"] = topology.version

                async def run() -> Seen:
                    async with asyncio.timeout(LONGEST * rounds):
                        return await run_failover(name, topology, Path(folder), seed, rounds)

                seen = asyncio.run(run())
        except CannotStartError as error:
            if found["seeds"]:
                found["unfinished"].append(f"seed {seed}: {error!r}"[:500])
            else:
                found["skipped"] = str(error)
        except Exception as error:  # noqa: BLE001 - it ends this run, not the others; the command fails by it
            found["unfinished"].append(f"seed {seed}: {error!r}"[:500])
        else:
            _add(found, seed, rounds, seen)
            name = f"failover {name} {seed}"
            histories.keep(Path(folder) / f"events-{seed}", name, found["code"])
            if keep is not None and _counted(seen.broken):
                shutil.copytree(folder, keep / re.sub(r"\W+", "-", name), dirs_exist_ok=True)
    found["day"] = str(datetime.now(timezone.utc).date())


def _add(found: dict[str, Any], seed: int, rounds: int, seen: Seen) -> None:
    found["seeds"].append(seed)
    found["rounds"] += rounds
    found["lost"] += seen.lost
    found["forgotten"] += seen.forgotten
    found["broken"] = Counter(found["broken"])
    for rule, violations in seen.broken.items():
        found["broken"][rule] += len(violations)
        found["examples"] += [f"seed {seed}, {rule}: {one}" for one in violations[:2]]
    for way, seconds in seen.recoveries.items():
        found["recoveries"].setdefault(way, []).extend(
            None if one is None else round(one, 2) for one in seconds
        )


def _counted(broken: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `broken` that have violations."""
    return {rule: found for rule, found in broken.items() if found}


def _problems(found: Mapping[str, Any]) -> list[str]:
    missed = [
        f"{way}: {'never' if None in seconds else f'{max(seconds):.1f} s'}"
        for way, seconds in found["recoveries"].items()
        if None in seconds or max(seconds) > TARGET
    ]
    if found["lost"] and not FAILOVERS[found["name"]].lossy:
        missed.append(f"{found['lost']} commits lost by a database that may lose none")
    return [*found["examples"], *found["unfinished"], *(f"missed: {each}" for each in missed)]


def _read() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def _write(found: dict[str, Any]) -> None:
    known = {one["name"]: one for one in [*_read(), found]}
    lines = [json.dumps(known[name]) for name in FAILOVERS if name in known]
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def render(code: str, results: Iterable[Mapping[str, Any]] | None = None) -> list[str]:
    """Lines of the document; `results` are those of the file unless they are given. Those of other
    code than `code` name it.
    """
    kept = [*(_read() if results is None else results)]
    heads = [
        *("failover", "rounds (seeds)", "broken promises", *COLUMNS),
        *("commits lost by the database", "deliveries lost by it", "seconds until work goes on"),
        "run on",
    ]
    lines = [
        "",
        "## Failovers",
        "",
        "Generated by `just test-failover`, with which you repeat all runs. A server takes the",
        "place of another while an application publishes and workers handle. Each message is",
        "committed with a row of the application, so its rows show which messages the database",
        "has kept. Commits that the database itself has lost, as an asynchronous standby does,",
        "have columns of their own. The same rules as above are checked on the rest; broken",
        "promises is their sum.",
        "",
        "A standby counts as following only when a row that was just written has arrived there.",
        "Before each next round the old primary returns by pg_rewind, and a killed node joins its",
        "cluster again. The seconds are the median and the maximum, by the way on which a worker",
        "reaches the servers, from the moment at which the new server takes writes until the",
        f"worker starts a message that it has claimed there; target {TARGET:g} s. The lock of a",
        "primary that is killed under Patroni runs out after 20 s (`ttl`): in that time you can",
        "write nothing, and it does not count.",
        "",
        f"| {' | '.join(heads)} |",
        "|---|---|" + "---:|" * (3 + len(COLUMNS)) + "---|---|",
        *(_row(found, code) for found in kept),
    ]
    problems = [
        f"* {found['name']}: {each}"
        for found in kept
        for each in [*found["examples"][:3], *found["unfinished"][:3]]
    ]
    return [*lines, *(["", *problems] if problems else [])]


def _row(found: Mapping[str, Any], code: str) -> str:
    other = "" if found["code"] == code else f", code `{found['code']}`"
    ran_on = f"{found['day']}, {found['server'] or 'no server'}{other}"
    if not found["seeds"]:
        why = found["skipped"] or "; ".join(found["unfinished"])
        return f"| {found['name']} | not run: {why} |" + " |" * (4 + len(COLUMNS)) + f" {ran_on} |"
    counts = [sum(_counted(found["broken"]).values())]
    counts += [found["broken"].get(rule, 0) for rule in COLUMNS]
    counts += [found["lost"], found["forgotten"]]
    seconds = "; ".join(_seconds(*each) for each in sorted(found["recoveries"].items()))
    cells = " | ".join(map(str, counts))
    rounds = f"{found['rounds']} ({len(found['seeds'])})"
    return f"| {found['name']} | {rounds} | {cells} | {seconds} | {ran_on} |"


def _seconds(way: str, seconds: list[float | None]) -> str:
    done = [one for one in seconds if one is not None]
    text = f"{way} {statistics.median(done):.1f}, {max(done):.1f}" if done else way
    never = f", {len(seconds) - len(done)} never" if None in seconds else ""
    missed = never or max(done, default=0.0) > TARGET
    return f"**{text}{never}**" if missed else text


assert frozenset(COLUMNS) <= RULES.keys()  # noqa: S101 - a rule that is renamed is renamed here
