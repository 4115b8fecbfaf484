"""Run variants in turn, each in a process and a database of its own; keep every figure and what it
was taken on."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import create_engine, text

from benchmarks.origin import code, commit
from benchmarks.settings import settings
from tools.servers import VARIABLES

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
TIMEOUT = 900.0
"""Seconds for one run, if nothing else is said."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One thing that is measured: a scenario of a program on a database."""

    name: str
    scenario: str
    kind: str | None = "postgresql"
    """The database it gets, empty; None for none."""
    program: tuple[str, ...] = (sys.executable, "-m", "benchmarks.ours")
    options: dict[str, Any] = field(default_factory=dict)
    timeout: float = TIMEOUT
    folder: Path = ROOT
    """Where it runs: the code of this tree, or of another revision."""


@contextlib.contextmanager
def database(kind: str) -> Iterator[str]:
    """URL of a new, empty database, without a driver."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{Path(folder) / 'bench.db'}"
        return
    admin = create_engine(os.environ[VARIABLES[kind]], isolation_level="AUTOCOMMIT")
    name = f"bench_{uuid4().hex[:12]}"
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield admin.url.set(drivername=kind, database=name).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.execute(
                text(f"DROP DATABASE {name}{' WITH (FORCE)' if kind == 'postgresql' else ''}")
            )
            if kind == "postgresql":
                connection.execute(text("CHECKPOINT"))  # none of the next run's business
        admin.dispose()


def run(variant: Variant) -> Result:
    """One measurement; adds messages a second (`rate`) and CPU seconds a message (`cpu_each`)."""
    with contextlib.ExitStack() as stack:
        options = dict(variant.options)
        if variant.kind is not None:
            options["url"] = stack.enter_context(database(variant.kind))
        command = [*variant.program, variant.scenario, json.dumps(options)]
        done = subprocess.run(
            command,
            cwd=variant.folder,
            capture_output=True,
            text=True,
            timeout=variant.timeout,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{variant.name} failed: {done.stderr[-2000:]}")
        result: Result = json.loads(done.stdout.strip().splitlines()[-1])
        if "seconds" in result and "count" in result:
            result["rate"] = result["count"] / result["seconds"]
            result["cpu_each"] = result["cpu"] / result["count"]
        return result


def interleaved(
    variants: Sequence[Variant], rounds: int, say: Callable[[str], object] = print
) -> dict[str, list[Result]]:
    """Every variant once a round, in turning order, so that a slow minute affects all alike."""
    results: dict[str, list[Result]] = {variant.name: [] for variant in variants}
    for n in range(rounds):
        turn = n % len(variants)
        for variant in (*variants[turn:], *variants[:turn]):
            result = run(variant)
            results[variant.name].append(result)
            shown = f"{result['rate']:,.0f}/s" if "rate" in result else json.dumps(result)
            say(f"  round {n + 1}: {variant.name}: {shown}")
    return results


def machine() -> dict[str, Any]:
    """What the figures are taken on, when, and with which code."""
    names = ("faststream", "sqlalchemy", "asyncpg", "asyncmy", "aiosqlite", "pyspark")
    return {
        "taken": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version(name) for name in names},
        "databases": settings(),
        "commit": commit(),
        "code": code(),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def keep(name: str, content: dict[str, Any]) -> Path:
    """Write benchmarks/results/`name`.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
