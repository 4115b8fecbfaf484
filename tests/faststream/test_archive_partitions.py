"""A broker whose archive has partitions: it adds them ahead, and drops the old ones."""

import logging
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import Retention, SetupError, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.config import (
    PARTITIONS_AHEAD,
    get_next_partition_start,
    get_partition_start,
)
from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.schema.tables import build_tables
from tests.accounts import account
from tests.faststream.conftest import GRACE, QUICK, Heard
from tests.faststream.test_operating_cli import Shell
from tests.helpers import eventually

pytestmark = [
    pytest.mark.capability("an archive in partitions of time (`archive_partitions`)"),
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
]
DAYS = SqlBrokerSchemaConfig(archive_partitions="day")
ALL = Retention(completed="2d", failed="2d", discarded="3d")


@pytest.fixture(autouse=True)
async def _one_day(engine: AsyncEngine) -> None:
    """No test goes over midnight, which is by UTC."""
    soon = "(statement_timestamp() + interval '2 minutes') AT TIME ZONE 'UTC'"
    now = "statement_timestamp() AT TIME ZONE 'UTC'"

    async def same_day() -> bool:
        async with engine.connect() as connection:
            asked = text(f"SELECT CAST({now} AS date) = CAST({soon} AS date)")
            return bool(await connection.scalar(asked))

    await eventually(same_day, timeout=300, step=1.0)


@pytest.fixture
async def parted(engine: AsyncEngine, logger: logging.Logger) -> AsyncIterator[SqlBroker]:
    async with engine.begin() as connection:
        await connection.run_sync(create_all, build_tables(DAYS, dialect_name="postgresql"))
    broker = SqlBroker(engine, logger=logger, schema=DAYS, graceful_timeout=GRACE, retention=ALL)
    yield broker
    await broker.stop()


async def fill(engine: AsyncEngine, *days: int) -> None:
    """A message that ended so many days ago, in a partition of its day, or in the DEFAULT one."""
    async with engine.begin() as connection:
        now: datetime = await connection.scalar(text("SELECT statement_timestamp()"))
        for ago in days:
            start = get_partition_start(now - timedelta(days=ago), "day")
            end = get_next_partition_start(start, "day")
            bounds = f"FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
            made = f"CREATE TABLE ago_{ago} PARTITION OF message_archive FOR VALUES {bounds}"
            if ago < 100:
                await connection.execute(text(made.replace(":", "\\:")))
            await connection.execute(
                text(
                    "INSERT INTO message_archive (id, queue, payload, state, created_at, "
                    "next_attempt_at, archived_at) "
                    "VALUES (:id, 'q', 'x', 'COMPLETED', :at, :at, :at)"
                ),
                {"id": 1000 + ago, "at": start + timedelta(hours=1)},
            )


async def partitions(engine: AsyncEngine) -> list[str]:
    asked = (
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'message_archive'\\:\\:regclass ORDER BY 1"
    )
    async with engine.connect() as connection:
        return list(await connection.scalars(text(asked)))


async def ids(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return list(await connection.scalars(text("SELECT id FROM message_archive ORDER BY id")))


async def test_a_broker_adds_and_drops_partitions(
    parted: SqlBroker, engine: AsyncEngine, heard: Heard
) -> None:
    await fill(engine, 1, 10, 20, 200)
    seen = []

    @parted.subscriber("q", **QUICK)
    async def handle(body: Any) -> None:
        seen.append(body)

    await parted.start()
    message_id = await parted.publish(7, "q")

    async def done() -> bool:
        found = await partitions(engine)
        gone = await ids(engine) == [message_id, 1001]
        told = bool(heard.texts("old partitions of the archive were dropped"))
        return (
            told and gone and len(found) == 1 + (PARTITIONS_AHEAD + 1) + 1 and "ago_20" not in found
        )

    await eventually(done)
    assert seen == [7]
    [told] = heard.texts("old partitions of the archive were dropped")
    assert told.endswith("ago_20, ago_10")
    assert len(heard.texts("was added to the archive")) == PARTITIONS_AHEAD + 1
    found = await parted.admin.message(message_id)
    assert found is not None
    assert found.message.state.name == "COMPLETED"


async def test_a_partition_stays_until_every_outcome_is_old(
    parted: SqlBroker, engine: AsyncEngine
) -> None:
    await fill(engine, 4, 5)
    some = await parted.admin.prune(Retention(completed="2d", failed="2d"))
    assert (some.completed, some.partitions) == (2, [])
    await fill(engine, 6)
    later = Retention(completed="2d", failed="2d", discarded="90d")
    assert (await parted.admin.prune(later)).completed == 1
    assert set(await partitions(engine)) >= {"ago_4", "ago_5", "ago_6"}
    # With a lake only what is empty goes, as whatever is left may be nowhere else.
    await fill(engine, 7)
    lake = Retention(completed="2d", failed="2d", discarded="2d", unless_loaded_by="shop")
    found = await parted.admin.prune(lake)
    assert (found.rows, found.partitions) == (0, ["ago_6", "ago_5", "ago_4"])
    assert await ids(engine) == [1007]


async def test_a_user_who_is_not_the_owner_is_told_and_goes_on(
    parted: SqlBroker, engine: AsyncEngine, database_url: str, heard: Heard, logger: logging.Logger
) -> None:
    await fill(engine, 10)
    with account(database_url) as user:
        rights = "SELECT, INSERT, UPDATE, DELETE"
        user.execute(
            f"GRANT {rights} ON message, message_archive, message_policy_state TO {{who}}",
            "GRANT USAGE ON SEQUENCE message_id_seq TO {who}",
        )
        own = user.engine()
        broker = SqlBroker(own, logger=logger, schema=DAYS, retention=ALL)

        @broker.subscriber("q", **QUICK)
        async def handle(_body: Any) -> None:
            pass

        await broker.start()
        message_id = await broker.publish(7, "q")

        async def done() -> bool:
            return await ids(engine) == [message_id] and bool(
                heard.texts("cannot add partitions to the archive")
            )

        await eventually(done)
        [told] = heard.texts("cannot add partitions to the archive")
        assert "sqlbroker partitions" in told
        assert await partitions(engine) == ["ago_10", "message_archive_default"]
        await broker.stop()
        await own.dispose()


async def test_the_command(broker: SqlBroker, engine: AsyncEngine, database_url: str) -> None:
    shell = Shell(database_url)
    result = await shell.result("partitions")
    assert result.exit_code != 0
    convert = ("partitions", "--convert", "--every", "day")
    assert "Continue?" in await shell.run(*convert, answer="n\n", code=1)
    found = await shell.json(*convert, "--yes", "--by", "Ann")
    assert found["converted"]
    assert len(found["added"]) == PARTITIONS_AHEAD - 1
    assert "0 partitions added" in await shell.run("partitions", "--every", "day")
    done = [(each.action, each.by, each.arguments) for each in await broker.admin.audit()]
    added = [("add_partition", "Ann", {"partition": name}) for name in found["added"]]
    assert done == [*reversed(added), ("convert_archive", "Ann", {"every": "day"})]


async def test_an_archive_without_partitions_is_named(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    with pytest.raises(SetupError, match="the archive is not partitioned"):
        await broker.admin.add_partitions()
    other = SqlBroker(engine, logger=None, schema=DAYS)
    with pytest.raises(SetupError, match="convert_archive"):
        await other.start()
    await other.stop()
