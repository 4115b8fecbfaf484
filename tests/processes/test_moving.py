"""docs/howto/moving.md: the workers of the other faststream-sqlbroker finish while ours start."""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.peers.setup import environment
from faststream_sqlbroker import SchemaError, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.schema.types import clock
from tests.helpers import eventually

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "howto" / "moving.md").read_text()
COPY = dict(re.findall(r"```sql\n    -- ([^\n]+)\n(.*?)```", PAGE, re.DOTALL))
HOW = {
    "postgresql": "PostgreSQL",
    "mariadb": "MySQL and MariaDB",
    "mysql": "MySQL and MariaDB",
    "sqlite": "SQLite",
}
DRIVERS = {
    "postgresql": "postgresql+asyncpg",
    "mariadb": "mysql+asyncmy",
    "mysql": "mysql+asyncmy",
    "sqlite": "sqlite+aiosqlite",
}
OURS = SqlBrokerSchemaConfig(message_table_name="jobs", message_archive_table_name="jobs_archive")
TABLES = build_tables(OURS)


@pytest.fixture(scope="session")
def old_python() -> Path:
    """The other package's interpreter; skip where it cannot be installed, fail in CI."""
    try:
        return environment("sqlbroker")
    except (subprocess.CalledProcessError, OSError) as error:
        reason = f"faststream-sqlbroker 0.1.0a11 cannot be installed: {error}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


class Old:
    """Its program."""

    def __init__(self, python: Path, url: str, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "handled"
        command = [str(python), str(Path(__file__).parent / "old_package.py"), url, str(folder)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = subprocess.Popen(command, env=environment)

    async def ready(self) -> None:
        """Wait until its tables are there, with its messages."""

        def done() -> bool:
            assert self._process.poll() is None
            return (self._folder / "ready").exists()

        await eventually(done, timeout=240, step=0.05)

    def work(self) -> None:
        (self._folder / "go").touch()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(240)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def handled(self) -> list[int]:
        return [int(line) for line in self._file.read_text().split()] if self._file.exists() else []


@pytest.fixture
def old(database: str, database_url: str, old_python: Path, tmp_path: Path) -> Iterator[Old]:
    url = make_url(database_url).set(drivername=DRIVERS[database])
    old = Old(old_python, url.render_as_string(hide_password=False), tmp_path)
    yield old
    old.kill()


def check_copied(rows: Sequence[Any]) -> None:
    """All that a message has is copied: five were delayed by an hour, two failed and wait two."""
    by_body = {json.loads(row["payload"]): row for row in rows}
    assert set(by_body) == {9, 19, 20, 21, 22, 23, 24}
    for body, row in by_body.items():
        failed = body in {9, 19}
        assert row["state"] == ("RETRYABLE" if failed else "PENDING")
        assert row["attempts_count"] == int(failed)
        assert row["headers"] == {"content-type": "application/json", "source": "old"}
        length = timedelta(hours=2 if failed else 1)
        passed = row["now"] + length - row["next_attempt_at"]
        # The old table of MySQL keeps whole seconds, rounded up or down.
        assert timedelta(seconds=-1) < passed < timedelta(minutes=10)
        assert (row["first_attempt_at"] is not None) is failed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("database", list(HOW), indirect=True)
async def test_its_workers_finish_and_ours_start(
    database: str, engine: AsyncEngine, old: Old
) -> None:
    await old.ready()
    refusing = SqlBroker(engine, logger=None)
    with pytest.raises(SchemaError, match=r"belongs to faststream-sqlbroker 0\.1"):
        await refusing.create_tables()
    broker = SqlBroker(engine, logger=None, schema=OURS)
    await broker.create_tables()
    ours: Counter[int] = Counter()

    @broker.subscriber("q", max_fetch_interval=0.1)
    async def handle(body: int) -> None:
        ours[body] += 1

    async def number(query: str) -> int:
        async with engine.connect() as connection:
            return int(await connection.scalar(text(query)))

    await broker.start()
    old.work()
    for body in range(100, 110):
        await broker.publish(body, "q")
    # Delayed ones, and the two that failed and are to be tried again, are left.
    await eventually(lambda: sorted(old.handled()) == list(range(20)))
    await eventually(lambda: len(ours) == 10)

    async def settled() -> bool:
        return await number("SELECT count(*) FROM message") == 7

    await eventually(settled)
    old.stop()

    # Ours must not take them before the test has looked at them.
    await broker.admin.pause("q")
    async with engine.begin() as connection:
        for statement in COPY[HOW[database]].split(";"):
            if statement.strip():
                await connection.execute(text(statement.replace("::", "\\:\\:")))
    assert await number("SELECT count(*) FROM message") == 0
    jobs = TABLES.message
    async with engine.connect() as connection:
        rows = (await connection.execute(select(jobs, clock().label("now")))).mappings().all()
    check_copied(rows)
    async with engine.begin() as connection:
        await connection.execute(update(jobs).values(next_attempt_at=clock()))
    await broker.admin.resume("q")
    await eventually(lambda: len(ours) == 17)
    await broker.stop()
    assert ours == Counter([*range(100, 110), 9, 19, *range(20, 25)])
    assert Counter(old.handled()) == Counter(range(20))
