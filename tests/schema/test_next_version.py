"""The next version's migration runs while processes of this one publish and consume."""

import asyncio
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import ConstantRetryStrategy, SqlBroker, SqlConnection, Throttle
from faststream_sqlbroker.schema import migrate
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.helpers import eventually

pytestmark = pytest.mark.capability("Alembic migrations and validation at start")

CONFIG = SqlBrokerSchemaConfig()
TABLES = build_tables(CONFIG)
NEXT = f"""
from alembic import op
from sqlalchemy import Column, Integer

revision, down_revision, branch_labels, depends_on = "next", {migrate.HEAD!r}, None, None


def upgrade():
    for table in ("message", "message_archive", "message_policy_state"):
        op.add_column(table, Column("counted", Integer, nullable=False, server_default="7"))
        op.add_column(table, Column("noted", Integer))
        op.create_index("ix_noted_" + table, table, ["noted"])
"""
QUEUES = ("plain", "in_transaction", "throttled")


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each table a column that every row gets, one that none gets, and an index."""
    (tmp_path / "next.py").write_text(NEXT)
    original = migrate._load_script

    def script() -> tuple[Config, ScriptDirectory]:
        config, _ = original()
        own = Path(migrate.__file__).parent / "versions"
        config.set_main_option("version_locations", f"{own}{os.pathsep}{tmp_path}")
        return config, ScriptDirectory.from_config(config)

    monkeypatch.setattr(migrate, "_load_script", script)


class Process:
    """A broker with connections of its own, as a process of this version has."""

    def __init__(self, url: str) -> None:
        self.handled: Counter[int] = Counter()
        self.published: list[int] = []
        waits = {"timeout": 60} if url.startswith("sqlite") else {}
        self.engine = create_async_engine(url, connect_args=waits)
        self.broker = SqlBroker(self.engine, logger=logging.getLogger("process"))
        seen: set[int] = set()
        options = {
            "max_fetch_interval": 0.1,
            "fetch_batch_size": 20,
            "retry_strategy": ConstantRetryStrategy(delay_seconds=0.05, max_attempts=None),
        }

        async def handle(body: int) -> None:
            if body % 10 == 0 and body not in seen:
                seen.add(body)
                raise ValueError(body)
            self.handled[body] += 1

        async def handle_in_transaction(body: int, connection: SqlConnection) -> None:
            await connection.execute(text("SELECT 1"))
            await handle(body)

        at_a_rate = Throttle(1000, per="1s", key=True)
        self.broker.subscriber("plain", **options)(handle)
        self.broker.subscriber("in_transaction", transactional=True, **options)(
            handle_in_transaction
        )
        self.broker.subscriber("throttled", policies=[at_a_rate], **options)(handle)

    async def publish(self, bodies: Iterator[int], count: int) -> None:
        for queue in QUEUES:
            new = list(itertools.islice(bodies, count))
            await self.broker.publish_batch(*new, queue=queue, key="k")
            self.published.extend(new)

    async def stop(self) -> None:
        await self.broker.stop()
        await self.engine.dispose()


def counts(processes: list[Process]) -> list[int]:
    """How many messages each of them has handled and published."""
    return [size for each in processes for size in (len(each.handled), len(each.published))]


def have_gone_on(processes: list[Process], since: list[int]) -> bool:
    """Whether each of them has handled and published a few more than `since`."""
    return all(now > then + 5 for now, then in zip(counts(processes), since, strict=True))


@pytest.mark.usefixtures("next_version")
async def test_processes_of_the_version_before_lose_nothing_and_start_again(
    engine: AsyncEngine, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def migrate_to(version: str, connection: Connection) -> None:
        migrate.migrate(CONFIG, connection=connection, to=version)

    async with engine.begin() as connection:
        await connection.run_sync(lambda c: migrate_to(migrate.HEAD, c))
    bodies = itertools.count()
    upgraded = asyncio.Event()

    async def publish_until_upgraded(process: Process) -> None:
        while not upgraded.is_set():
            await process.publish(bodies, 1)
            await asyncio.sleep(0.05)

    async def count(statement: str) -> int:
        async with engine.connect() as connection:
            return int(await connection.scalar(text(statement)))

    processes = [Process(database_url) for _ in range(2)]
    await processes[0].publish(bodies, 50)
    for process in processes:
        await process.broker.start()
    publishing = [asyncio.create_task(publish_until_upgraded(each)) for each in processes]
    await eventually(lambda: have_gone_on(processes, [0, 0, 0, 0]))
    async with engine.begin() as connection:
        await connection.run_sync(lambda c: migrate.upgrade(c, CONFIG))
    before = counts(processes)
    # Both have published and handled with the new tables.
    await eventually(lambda: have_gone_on(processes, before))
    upgraded.set()
    await asyncio.gather(*publishing)
    await processes[-1].stop()
    processes.append(Process(database_url))
    await processes[-1].broker.start()
    await processes[-1].publish(bodies, 10)

    async def settled() -> bool:
        return await count("SELECT count(*) FROM message") == 0

    await eventually(settled)
    for process in (processes[0], processes[-1]):
        await process.stop()
    published = [body for each in processes for body in each.published]
    assert {body for each in processes for body in each.handled} == set(published)
    assert TABLES.archive is not None
    async with engine.connect() as connection:
        rows = select(TABLES.archive.c.state, func.count()).group_by(TABLES.archive.c.state)
        states = [tuple(row) for row in await connection.execute(rows)]
    assert states == [("COMPLETED", len(published))]
    assert await count("SELECT count(*) FROM message_archive WHERE counted <> 7") == 0
    assert await count("SELECT count(*) FROM message_schema_version WHERE version_num = 'next'")
    errors = [each for each in caplog.records if each.levelno > logging.WARNING]
    assert [each.getMessage() for each in errors if "ValueError" not in each.getMessage()] == []
