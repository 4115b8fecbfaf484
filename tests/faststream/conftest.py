"""A broker over an empty database, quick to look and quick to stop."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.flow import consumer
from faststream_sqlbroker.flow.fleet import heartbeat
from faststream_sqlbroker.schema.types import clock
from tests.helpers import eventually
from tests.quick_tables import TABLES

QUICK: Any = {"max_fetch_interval": 0.05, "flush_interval": 0.01, "wakeup": "poll"}
"""Subscriber options for tests that wait for what happens."""
CALM: Any = {**QUICK, "max_fetch_interval": 0.5}
"""As `QUICK`, for many subscribers in one test: looks of all of them cost more than the wait."""
GRACE = 60.0
"""Seconds that a stop waits for handlers: what is on its way is not cut off."""
Make = Callable[..., SqlBroker]
"""Makes brokers with options of their own, which are stopped at the end."""


KINDS = ("sqlite", "postgresql", "mariadb", "mysql")


def on_each(names: str, everywhere: Sequence[Any], on_one: Sequence[Any]) -> pytest.MarkDecorator:
    """Values of the parameters `names`: `everywhere` on each database, `on_one` on SQLite only, as
    they make no difference to what is written."""

    def case(value: Any, kind: str) -> Any:
        values = value if isinstance(value, tuple) and "," in names else (value,)
        return pytest.param(*values, kind)

    cases = [case(value, kind) for value in everywhere for kind in KINDS]
    cases += [case(value, "sqlite") for value in on_one]
    return pytest.mark.parametrize((*names.split(", "), "database"), cases, indirect=["database"])


class Look:
    """A direct look at the tables."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.tables = TABLES

    async def rows(self, archive: bool = False) -> list[dict[str, Any]]:
        """All rows, by id."""
        table = self.tables.archive if archive else self.tables.message
        assert table is not None
        async with self.engine.connect() as connection:
            result = await connection.execute(select(table).order_by(table.c.id))
            return [dict(row._mapping) for row in result]

    async def archived(self, count: int = 1) -> list[dict[str, Any]]:
        """Wait until `count` messages are archived and none is live."""

        async def done() -> list[dict[str, Any]]:
            rows = await self.rows(archive=True)
            return rows if len(rows) == count and not await self.rows() else []

        return await eventually(done)

    async def end_leases(self) -> None:
        """Let every lease run out, by the database's clock."""
        message = self.tables.message
        of_all = update(message).where(message.c.state == "PROCESSING")
        async with self.engine.begin() as connection:
            await connection.execute(of_all.values(lease_expires_at=clock()))

    async def lease_over(self) -> None:
        """Wait until the lease of the only live message has run out, by the database's clock."""
        is_over = select(self.tables.message.c.lease_expires_at < clock())

        async def over() -> bool:
            async with self.engine.connect() as connection:
                return bool((await connection.execute(is_over)).scalar_one())

        await eventually(over, step=0.05)

    async def in_state(self, state: str) -> dict[str, Any]:
        """Wait until the only live message is in `state`."""

        async def done() -> dict[str, Any] | None:
            rows = await self.rows()
            return rows[0] if len(rows) == 1 and rows[0]["state"] == state else None

        row = await eventually(done)
        assert row is not None
        return row


class Heard(logging.Handler):
    """Keeps log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def texts(self, part: str, level: int = logging.NOTSET) -> list[str]:
        """Messages of at least `level` that contain `part`."""
        return [
            r.getMessage() for r in self.records if part in r.getMessage() and r.levelno >= level
        ]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def logger(heard: Heard) -> logging.Logger:
    logger = logging.Logger("test")  # noqa: LOG001 - one for each test
    logger.addHandler(heard)
    return logger


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that the broker must not reach because a process or a server stands still."""
    # Heartbeats are frequent in tests, and a busy machine may be late with many of them.
    monkeypatch.setattr(heartbeat, "LEASE_INTERVALS", 1_000)
    # A process that has stopped is gone at once, and its last outcomes are written.
    monkeypatch.setattr(heartbeat, "LEAVE_TIMEOUT", GRACE)
    monkeypatch.setattr(consumer, "FINAL_FLUSH_TIMEOUT", GRACE)


async def clean_up(broker: SqlBroker) -> None:
    """Stop it at the end of a test, without patience for handlers that never end."""
    broker.config.broker_config.graceful_timeout = 0.1
    await broker.stop()


@pytest.fixture
async def broker(engine: AsyncEngine, logger: logging.Logger) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(engine, logger=logger, graceful_timeout=GRACE)
    await broker.create_tables()
    yield broker
    await clean_up(broker)


@pytest.fixture
async def make(engine: AsyncEngine, logger: logging.Logger) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        def make(**options: Any) -> SqlBroker:
            made = SqlBroker(engine, logger=logger, graceful_timeout=GRACE, **options)
            stack.push_async_callback(clean_up, made)
            return made

        yield make


@pytest.fixture
def look(engine: AsyncEngine) -> Look:
    return Look(engine)


@pytest.fixture(autouse=True)
def _time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stands still must not change what a start waits for and what an end gives back:
    none of these limits is reached."""
    limits = (
        "fleet.registration.FIRST_WAIT",
        "tasks.requests.LEAVE_TIMEOUT",
        "tasks.schedules.RELEASE_TIMEOUT",
        "loop.STOP_LIMIT",
        "shielded.SHIELDED_TIMEOUT",
        "fleet.rights.RIGHTS_TIMEOUT",
    )
    for limit in limits:
        monkeypatch.setattr(f"faststream_sqlbroker.flow.{limit}", 60.0)
