"""What is written down while the service runs, in the same database and by its clock, and read at
the end.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, Text, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBrokerSchemaConfig, include_tables

metadata = MetaData()
sends = Table(
    "email_sends",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("message_id", BigInteger, nullable=False),
    Column("process", Integer, nullable=False),
    Column("sent_at", BigInteger, nullable=False),
)
grants = Table(
    "email_grants",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("info", Text, nullable=False),
)
tables = include_tables(metadata, SqlBrokerSchemaConfig())
message = tables.message
archive: Any = tables.archive

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MYSQL = ("mysql", "mariadb")
"""Names of SQLAlchemy's for both; a URL of either kind may begin with mysql+."""
_NOW = {
    **dict.fromkeys(MYSQL, "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"),
    "postgresql": "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS bigint)",
    "sqlite": "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000",
}
_NOTING = """
CREATE FUNCTION note_grants() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO email_grants (info) VALUES (NEW.info::text); RETURN NULL; END $$
"""
_NOTE_ON_POSTGRESQL = """
CREATE TRIGGER note_grants AFTER INSERT OR UPDATE ON message_policy_state
FOR EACH ROW WHEN (NEW.scope = '{scope}') EXECUTE FUNCTION note_grants()
"""
_NOTE_ON_MYSQL = """
CREATE TRIGGER note_grants_{event} AFTER {event} ON message_policy_state FOR EACH ROW
INSERT INTO email_grants (info) SELECT NEW.info FROM DUAL WHERE NEW.scope = '{scope}'
"""
_NOTE_ON_SQLITE = """
CREATE TRIGGER note_grants_{event} AFTER {event} ON message_policy_state WHEN NEW.scope = '{scope}'
BEGIN INSERT INTO email_grants (info) VALUES (NEW.info); END
"""


@dataclass(frozen=True)
class Mail:
    """An e-mail that has ended. Times are microseconds since 1970, by the database's clock."""

    id: int
    user: str
    created_at: int
    moved_at: int
    """When it came into the queue that it ended in (of those that were sent)."""
    queue: str
    state: str
    reason: str | None
    related_id: int | None
    deliveries: int


@dataclass(frozen=True)
class Send:
    """A sender's own note that an e-mail has left."""

    message_id: int
    process: int
    sent_at: int


@dataclass(frozen=True)
class Starts:
    """What the throttle knows after a claim, as it stores it."""

    now: int
    """When the claim was."""
    slots: Sequence[tuple[int, int]]
    """[time, how many]: when e-mails were let through at the latest."""


async def create_records(engine: AsyncEngine, throttled: str) -> None:
    """Make the tables, and let the database note each slot that the first policy of the queue
    `throttled` grants.

    The throttle keeps its last slots in one row: each change of it is noted in the transaction that
    makes it.
    """
    scope = f"throttle0:{throttled}"
    if engine.dialect.name == "postgresql":
        triggers = [_NOTING, _NOTE_ON_POSTGRESQL.format(scope=scope)]
    else:
        note = _NOTE_ON_MYSQL if engine.dialect.name in MYSQL else _NOTE_ON_SQLITE
        triggers = [note.format(scope=scope, event=event) for event in ("INSERT", "UPDATE")]
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        for trigger in triggers:
            await connection.exec_driver_sql(trigger)


async def record_send(engine: AsyncEngine, message_id: int, process: int) -> None:
    """Note, durably, that an e-mail leaves now."""
    now = _NOW[engine.dialect.name]
    insert = "INSERT INTO email_sends (message_id, process, sent_at) "
    async with engine.begin() as connection:
        values = {"message_id": message_id, "process": process}
        await connection.execute(text(f"{insert} VALUES (:message_id, :process, {now})"), values)


async def count(engine: AsyncEngine, table: Any, *where: Any) -> int:
    """Rows of a table."""
    async with engine.connect() as connection:
        query = select(func.count()).select_from(table).where(*where)
        return int((await connection.execute(query)).scalar_one())


async def read_mails(engine: AsyncEngine) -> list[Mail]:
    """The archive."""
    a = archive.c
    query = select(
        a.id,
        a.key,
        a.created_at,
        a.next_attempt_at,
        a.queue,
        a.state,
        a.reason,
        a.related_id,
        a.deliveries_count,
    ).order_by(a.id)
    async with engine.connect() as connection:
        rows = (await connection.execute(query)).all()
    return [Mail(r[0], r[1], _microseconds(r[2]), _microseconds(r[3]), *r[4:]) for r in rows]


async def read_sends(engine: AsyncEngine) -> list[Send]:
    """What the senders have noted."""
    async with engine.connect() as connection:
        query = select(sends.c.message_id, sends.c.process, sends.c.sent_at).order_by(sends.c.id)
        return [Send(*row) for row in (await connection.execute(query)).all()]


async def read_grants(engine: AsyncEngine) -> Sequence[Starts]:
    """What the throttle knew after each claim, in the order of the claims."""
    async with engine.connect() as connection:
        query = select(grants.c.info).order_by(grants.c.id)
        infos = [json.loads(info) for info in (await connection.execute(query)).scalars()]
    return [
        Starts(max(at for *_, at in info["by"]), _slots(info["slots"]))
        for info in infos
        if info["slots"]
    ]


def _slots(groups: Sequence[int]) -> list[tuple[int, int]]:
    """Of pairs of the time since the slots before, and how many slots there are at that time."""
    return list(zip(accumulate(groups[::2]), groups[1::2], strict=True))


def _microseconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)
