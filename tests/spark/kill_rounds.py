"""Rounds of an archive that changes while its exports are killed: no row is lost or doubled.

    python -m tests.spark.kill_rounds postgresql --rounds 20    # needs the server's address

A round adds rows, archives some again, removes some that the lake has, keeps a transaction open,
and kills `sqlbroker archive export`, with its Java, at a step of a commit. Then an export runs to
its end, and the lake must have each row that ever was in the archive, once.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyspark.sql import SparkSession
from sqlalchemy import text

from pyspark_sqlbroker import (
    build_session,
    describe_export,
    export_archive,
    read_export,
    verify_export,
)
from tests.conftest import Servers
from tests.spark.conftest import Archive
from tests.spark.dying_export import ROWS_PER_COMMIT, STEPS

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
FIRST = datetime(2026, 3, 7, tzinfo=timezone.utc)
Row = tuple[int, datetime]


def rows_of(spark: SparkSession, path: Path) -> list[Row]:
    """Id and time of each row of a lake."""
    found = read_export(spark, str(path)).selectExpr("id", "unix_micros(archived_at)").collect()
    return [(number, EPOCH + timedelta(microseconds=micros)) for number, micros in found]


class Rounds:
    """One archive and its lake, over several rounds.

    Attributes:
        ever: Id and time of each row that was in the archive.
        deaths: How many exports were killed, by step.
    """

    def __init__(
        self, spark: SparkSession, archive: Archive, path: Path, seed: int, *, days: int = 3
    ) -> None:
        self.spark = spark
        self.archive = archive
        self.path = path
        self.ever: set[Row] = set()
        self.deaths: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._days = days
        self._there: dict[int, datetime] = {}
        self._next = 1

    def round(self, step: str, *, call: int = 1, at_once: bool = False) -> None:
        """Change the archive, kill an export at `step`, and end it.

        Args:
            step: One of `STEPS`.
            call: At which call of it.
            at_once: Another export and Delta's OPTIMIZE run at the same time, and rows go while
                both read.
        """
        late = self._new(4)
        with self.archive.engine.connect() as slow:
            self.archive.add(*late, connection=slow)
            # A writer on SQLite holds the whole database.
            if self.archive.kind == "sqlite":
                slow.commit()
            self._add(12)
            self._archive_again()
            if not at_once:
                self._remove()
            self._kill(step, call, at_once=at_once)
            self._look(late)
            slow.commit()
        self._keep(late)
        self._export()
        self.check()

    def check(self) -> None:
        """Compare the lake with all that ever was.

        Raises:
            AssertionError: a row is lost, doubled or altered.
        """
        rows = rows_of(self.spark, self.path)
        assert len(rows) == len(set(rows)), "doubled"
        assert set(rows) == self.ever, sorted(set(rows) ^ self.ever)[:5]
        found = verify_export(self.spark, str(self.path))
        assert found.intact, found

    def _look(self, late: list[dict[str, Any]]) -> None:
        """What a killed export has committed is whole: each row once, as it was."""
        there = self.ever | {(one["id"], one["archived_at"]) for one in late}
        rows = rows_of(self.spark, self.path) if self.path.exists() else []
        assert len(rows) == len(set(rows)), "doubled"
        assert set(rows) <= there, sorted(set(rows) - there)[:5]
        windows = describe_export(self.spark, str(self.path)).windows if rows else ()
        assert sum(one.rows for one in windows) == len(rows)

    def _export(self) -> None:
        export_archive(
            self.spark,
            self.archive.url,
            str(self.path),
            since="2026-01-01",
            safety_lag=0,
            record_as="shop",
            rows_per_commit=ROWS_PER_COMMIT,
        )

    def _kill(self, step: str, call: int, *, at_once: bool) -> None:
        root = Path(__file__).parents[2]
        url = self.archive.engine.url.render_as_string(hide_password=False)
        words = [url, str(self.path), step, str(call)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.dying_export", *words],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if at_once:
            self._while_it_runs(process)
        output = process.communicate()[0]
        # With another export at the same time there may be nothing left to commit.
        allowed = {-signal.SIGKILL, 0} if at_once else {-signal.SIGKILL}
        assert process.returncode in allowed, output
        secret = self.archive.engine.url.password
        assert secret is None or secret not in output
        self.deaths[step if process.returncode else "lived"] += 1

    def _while_it_runs(self, process: "subprocess.Popen[str]") -> None:
        timer = threading.Timer(self._random.uniform(3, 8), self._remove)
        timer.start()
        while process.poll() is None:
            self._export()
            with suppress(CommitFailedError):  # an export was faster
                DeltaTable(str(self.path)).optimize.compact()
            self._add(2)
            time.sleep(self._random.uniform(0, 1))
        timer.join()

    def _new(self, number: int) -> list[dict[str, Any]]:
        rows = [{"id": self._next + n, "archived_at": self._moment()} for n in range(number)]
        self._next += number
        return rows

    def _moment(self) -> datetime:
        return FIRST + timedelta(seconds=self._random.randrange(self._days * 86_400))

    def _add(self, number: int) -> None:
        rows = self._new(number)
        self.archive.add(*rows)
        self._keep(rows)

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        for one in rows:
            self.ever.add((one["id"], one["archived_at"]))
            self._there[one["id"]] = one["archived_at"]

    def _archive_again(self) -> None:
        """As after a redrive: the same id, at a later time; the lake has the first one."""
        for number in self._known(2):
            moment = self._moment() + timedelta(days=self._days)
            with self.archive.engine.begin() as connection:
                rows = self.archive.archive
                connection.execute(
                    rows.update().where(rows.c.id == number).values(archived_at=moment)
                )
            self._keep([{"id": number, "archived_at": moment}])

    def _remove(self) -> None:
        """Rows that the lake has, as a prune does."""
        for number in self._known(3):
            self.archive.execute("DELETE FROM message_archive WHERE id = :id", id=number)
            del self._there[number]

    def _known(self, number: int) -> list[int]:
        """Some ids whose rows an export of an earlier round has brought."""
        lake = set(rows_of(self.spark, self.path)) if self.path.exists() else set()
        there = sorted(one for one, moment in self._there.items() if (one, moment) in lake)
        return self._random.sample(there, min(number, len(there)))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def _database(kind: str, folder: str) -> Iterator[str]:
    """The URL of an empty database, which is removed at the end."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/archive.db"
        return
    name = f"sqlbroker_kills_{os.getpid()}"
    admin = Servers().admin(kind)
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield admin.url.set(database=name).render_as_string(hide_password=False)
    finally:
        force = " WITH (FORCE)" if kind == "postgresql" else ""
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name}{force}"))


def main() -> None:
    """Run rounds on one database, every second one with other exports at the same time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database", choices=["postgresql", "mariadb", "sqlite"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    spark = build_session(
        "kill rounds",
        databases=["mysql" if given.database == "mariadb" else given.database],
        master="local[2]",
        config={"spark.log.level": "ERROR"},
    )
    try:
        with TemporaryDirectory() as folder, _database(given.database, folder) as url:
            rounds = Rounds(spark, Archive(url), Path(folder) / "lake", given.seed)
            try:
                _run(rounds, given.rounds, random.Random(given.seed))
            finally:
                rounds.archive.engine.dispose()
    finally:
        spark.stop()


def _run(rounds: Rounds, number: int, chosen: random.Random) -> None:
    began = time.monotonic()
    for one in range(number):
        step = list(STEPS)[one % len(STEPS)]
        at_once = one % 2 == 1
        rounds.round(step, call=1 if at_once else chosen.choice((1, 1, 2)), at_once=at_once)
        _say(f"round {one + 1}: {step}, {len(rounds.ever)} rows")
    seconds = time.monotonic() - began
    _say(f"{number} rounds in {seconds:.0f} s; killed: {dict(rounds.deaths)}")
    there = len(rows_of(rounds.spark, rounds.path))
    _say(f"{there} rows in the lake, of {len(rounds.ever)} that ever were, each once")


if __name__ == "__main__":
    main()
