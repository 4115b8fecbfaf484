"""How fast Spark reads the archive, compared with the database's COPY and Spark's defaults, and
what a cluster gains by a second executor."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from benchmarks.compare import Comparison, Suite, over
from benchmarks.harness import ROOT, Result, Variant, database
from benchmarks.spark_fill import fill_archive
from tests.spark.cluster import Cluster
from tools.java import DRIVERS, install_spark
from tools.private import find

PLACES = ("/usr/lib/postgresql/*/bin",)
HEAP, LARGE_HEAP = "1g", "10g"
"""Ours reads within the first, or the run fails; Spark's defaults hold the whole result in memory.
"""

PARTITIONS = (1, 2, 4, 8)
OTHERS = {"mariadb": 4, "sqlite": 4}
"""By how much fewer rows than PostgreSQL."""

FIRST = datetime(2026, 1, 1, tzinfo=timezone.utc)
STEP, END = timedelta(seconds=1.3), timedelta(milliseconds=20)
"""The archive's rows (`fill_archive`): row g has ended at FIRST + g × STEP + END."""

CLUSTER = "Standalone cluster"
JOBS = ("read", "export")


class Runner:
    """A Spark session in a process of its own."""

    def __init__(self, heap: str, *cluster: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spark_runner", heap, *cluster],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def load(self, **load: Any) -> Result:
        """Read once."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(load) + "\n")
        self.process.stdin.flush()
        answer = self._answer() | {"count": load["count"], "partitions": load["partitions"]}
        return answer | {"rate": answer["count"] / answer["seconds"]}

    def _answer(self) -> Result:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the Spark session ended with {self.process.wait()}")
        answer: Result = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def runner(heap: str, *cluster: str) -> Iterator[Runner]:
    """A Spark session; on a cluster if its master and the number of executors are given. Ends with
    the context."""
    one = Runner(heap, *cluster)
    try:
        yield one
    finally:
        one.close()


def copy(url: str, count: int) -> Result:
    """`COPY … (FORMAT binary)` by psql over one connection, thrown away."""
    psql = shutil.which("psql") or find("psql", *PLACES)
    if psql is None:
        raise RuntimeError("psql is not installed: it comes with PostgreSQL's client package")
    begin = time.perf_counter()
    statement = "\\copy message_archive TO '/dev/null' (FORMAT binary)"
    subprocess.run([psql, url, "-qc", statement], check=True)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "count": count, "rate": count / seconds, "partitions": 1}


def suites() -> list[Suite]:
    """What is compared; the variants are run here, not by the harness."""
    names = [f"ours, {n} partitions" for n in PARTITIONS]
    postgresql = [
        "COPY binary, 1 connection",
        "Spark's defaults",
        *names,
        "format('sqlbroker'), 2 partitions",
    ]
    two = names[PARTITIONS.index(2)]
    comparisons = [
        Comparison(
            "PostgreSQL: 2 partitions ÷ COPY binary by one connection",
            over(two, postgresql[0]),
            least=1.0,
        ),
        Comparison(
            "PostgreSQL: 2 partitions ÷ Spark's JDBC defaults", over(two, postgresql[1]), least=2.5
        ),
        Comparison(
            "PostgreSQL: format('sqlbroker') ÷ Spark's JDBC defaults",
            over(postgresql[-1], postgresql[1]),
        ),
    ]
    shown = [Suite("PostgreSQL", _variants(postgresql), comparisons, shows=("rate",))]
    shown.append(
        Suite("PostgreSQL by partitions", _variants(names), shows=("rate",), axis="partitions")
    )
    for kind, title in (("mariadb", "MariaDB"), ("sqlite", "SQLite")):
        ours = f"ours, {title}"
        plain = f"Spark's defaults, {title}"
        comparison = Comparison(
            f"{title}: 2 partitions ÷ Spark's JDBC defaults", over(ours, plain), least=1.0
        )
        shown.append(Suite(title, _variants([plain, ours]), [comparison], shows=("rate",)))
        assert kind in OTHERS
    cluster = [executors(job, n) for job in JOBS for n in (1, 2)]
    comparisons = [
        Comparison(
            f"Standalone cluster: {job} by 2 executors ÷ by 1",
            over(executors(job, 2), executors(job, 1)),
        )
        for job in JOBS
    ]
    shown.append(Suite(CLUSTER, _variants(cluster), comparisons, shows=("rate",)))
    return shown


def executors(job: str, count: int) -> str:
    """The name of the variant: `job` by `count` executors of one core."""
    return f"{job}, {count} executor{'s' if count > 1 else ''}"


def _variants(names: list[str]) -> list[Variant]:
    return [Variant(name, "") for name in names]


def measure(rounds: int, rows: int) -> dict[str, dict[str, list[Result]]]:
    """Fill three databases, start the sessions, and take everything in turn; results by suite and
    variant."""
    if reason := install_spark(*DRIVERS):
        raise SystemExit(reason)
    results: dict[str, dict[str, list[Result]]] = {}
    with ExitStack() as stack:
        urls, counts = (
            {},
            {"postgresql": rows} | {kind: rows // less for kind, less in OTHERS.items()},
        )
        for kind, count in counts.items():
            urls[kind] = stack.enter_context(database(kind))
            fill_archive(urls[kind], kind, count)
            print(f"  filled {kind}: {count:,} rows", flush=True)
        with ExitStack() as local:
            small = local.enter_context(runner(HEAP))
            large = local.enter_context(runner(LARGE_HEAP))
            for n in range(-1, rounds):
                _keep(results, n, _round(urls, counts, small, large, check=n < 0))
        for n, round_ in enumerate(_cluster_rounds(urls["postgresql"], rows, rounds), -1):
            _keep(results, n, round_)
    results["PostgreSQL by partitions"] = {
        name: runs for name, runs in results["PostgreSQL"].items() if name.startswith("ours")
    }
    return results


def _keep(
    results: dict[str, dict[str, list[Result]]], n: int, taken: Iterator[tuple[str, str, Result]]
) -> None:
    """Round -1 is run and not counted: Java compiles what it runs often."""
    for name, suite, result in taken:
        if n >= 0:
            results.setdefault(suite, {}).setdefault(name, []).append(result)
            print(f"  round {n + 1}: {suite}: {name}: {result['rate']:,.0f} rows/s", flush=True)


def _cluster_rounds(
    url: str, rows: int, rounds: int
) -> Iterator[Iterator[tuple[str, str, Result]]]:
    """A session with one executor and one with two take turns, on a cluster of pyspark's classes.

    The worker offers three cores, so that both sessions have theirs from beginning to end; only one
    of them works at a time.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(Cluster(folder, cores=3, memory="4g"))
        sessions = {n: stack.enter_context(runner(HEAP, cluster.master, str(n))) for n in (1, 2)}
        for n in range(-1, rounds):
            yield _cluster_round(url, rows, sessions, folder / f"lakes{n}", check=n < 0)


def _cluster_round(
    url: str, rows: int, sessions: dict[int, Runner], folder: Path, *, check: bool
) -> Iterator[tuple[str, str, Result]]:
    until, exported = _first_days(rows)
    for n, session in sessions.items():
        load = {"url": url, "partitions": 2, "check": check}
        yield executors("read", n), CLUSTER, session.load(way="ours", count=rows, **load)
        lake = {"lake": str(folder / str(n)), "until": until.isoformat()}
        yield (
            executors("export", n),
            CLUSTER,
            session.load(way="export", count=exported, **load, **lake),
        )
    shutil.rmtree(folder)


def _first_days(rows: int) -> tuple[datetime, int]:
    """The end of the whole days that hold about a quarter of the rows, at least one; how many rows
    ended before it."""
    days = max(1, round(rows * STEP / 4 / timedelta(days=1)))
    return FIRST + timedelta(days=days), min(rows, (timedelta(days=days) - END) // STEP)


def _round(
    urls: dict[str, str], counts: dict[str, int], small: Runner, large: Runner, *, check: bool
) -> Iterator[tuple[str, str, Result]]:
    url = urls["postgresql"]
    count = counts["postgresql"]
    load = {"url": url, "count": count, "check": check}
    yield "COPY binary, 1 connection", "PostgreSQL", copy(url, count)
    for n in PARTITIONS:
        yield f"ours, {n} partitions", "PostgreSQL", small.load(way="ours", partitions=n, **load)
    yield "Spark's defaults", "PostgreSQL", large.load(way="plain", partitions=1, **load)
    yield (
        "format('sqlbroker'), 2 partitions",
        "PostgreSQL",
        small.load(way="format", partitions=2, **load),
    )
    for kind, title in (("mariadb", "MariaDB"), ("sqlite", "SQLite")):
        load = {"url": urls[kind], "count": counts[kind], "check": check}
        yield f"Spark's defaults, {title}", title, large.load(way="plain", partitions=1, **load)
        yield f"ours, {title}", title, small.load(way="ours", partitions=2, **load)
