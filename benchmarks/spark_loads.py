"""How fast Spark reads the archive, compared with the database's COPY and Spark's defaults."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.compare import Comparison, Suite, over
from benchmarks.harness import ROOT, Result, Variant, database
from benchmarks.spark_fill import fill_archive
from tools.private import find

PLACES = ("/usr/lib/postgresql/*/bin",)
HEAP, LARGE_HEAP = "1g", "10g"
"""Ours reads within the first, or the run fails; Spark's defaults hold the whole result in memory.
"""

PARTITIONS = (1, 2, 4, 8)
OTHERS = {"mariadb": 4, "sqlite": 4}
"""By how much fewer rows than PostgreSQL."""


class Runner:
    """A Spark session in a process of its own."""

    def __init__(self, heap: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spark_runner", heap],
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
def runner(heap: str) -> Iterator[Runner]:
    """A Spark session; ends with the context."""
    one = Runner(heap)
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
    return shown


def _variants(names: list[str]) -> list[Variant]:
    return [Variant(name, "") for name in names]


def measure(rounds: int, rows: int) -> dict[str, dict[str, list[Result]]]:
    """Fill three databases, start two sessions, and take everything in turn; results by suite and
    variant."""
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
        small = stack.enter_context(runner(HEAP))
        large = stack.enter_context(runner(LARGE_HEAP))
        for n in range(-1, rounds):  # the first is not counted: Java compiles what it runs often
            for name, suite, result in _round(urls, counts, small, large, check=n < 0):
                if n >= 0:
                    results.setdefault(suite, {}).setdefault(name, []).append(result)
                    print(
                        f"  round {n + 1}: {suite}: {name}: {result['rate']:,.0f} rows/s",
                        flush=True,
                    )
    results["PostgreSQL by partitions"] = {
        name: runs for name, runs in results["PostgreSQL"].items() if name.startswith("ours")
    }
    return results


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
