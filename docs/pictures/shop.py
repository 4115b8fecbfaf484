"""A shop on a bad morning: the tables that the pictures of the command line are taken of.

Times, ids and names are fixed, and SQLite's clock stands still, so that each picture comes out the
same.
"""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, create_engine, event, insert
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import Delay, SqlBroker
from faststream_sqlbroker.admin import Admin, Health
from faststream_sqlbroker.core.bulk_jobs import MOVE, REDRIVE, Job, dump_job
from faststream_sqlbroker.core.policies.flags import HELD_DELAY
from faststream_sqlbroker.core.settle import FINGERPRINT_LENGTH
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import ScheduleState, build_description, build_worker_name
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database.locks import LOCK
from faststream_sqlbroker.database.parts.audit import JOB
from faststream_sqlbroker.database.parts.live_subscribers import SUBSCRIBER
from faststream_sqlbroker.database.parts.policy_state import ACK_FIRST
from faststream_sqlbroker.database.schedules import SCHEDULE
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.testing.database import TestNow

NOW = datetime(2026, 3, 2, 9, 15, tzinfo=timezone.utc)
HOLDER = bytes.fromhex("5f1c90ab77d2e403")
WORKER = build_worker_name("shop-7d9f:17", HOLDER)
SENDER = build_worker_name("news-4c1d:9", bytes.fromhex("0b3a77e1c2d94f68"))
NO_ROUTE = "ConnectionError: no route to 10.0.7.3"
INVALID = "ValidationError: 1 validation error for Order"


def ago(minutes: float) -> datetime:
    """So many minutes before the moment of the pictures."""
    return NOW - timedelta(minutes=minutes)


class Told(Admin):
    """Without what depends on this machine."""

    async def health(self, **options: Any) -> Health:
        """As it is, but for the version of SQLite and the difference of two clocks."""
        found = await super().health(**options)
        database = replace(found.database, version="SQLite 3")
        return replace(found, clock_difference=0.0, clock_doubt=0.0, database=database)


class ShopBroker(SqlBroker):
    """Sees the shop's tables at `NOW`."""

    @property
    def admin(self) -> Admin:
        """For operators."""
        return Told(self._store, super().admin._hooks)  # noqa: SLF001 - of the same broker


def open_shop(folder: Path) -> ShopBroker:
    """Fill a new file in `folder`; a broker on it."""
    path = folder / "shop.db"
    tables = build_tables(SqlBrokerSchemaConfig(), dialect_name="sqlite")
    filling = create_engine(f"sqlite:///{path}")
    with filling.begin() as connection:
        create_all(connection, tables)
        _fill(connection, tables)
    filling.dispose()
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    microseconds = round(NOW.timestamp() * 1_000_000)
    clock: Any = SimpleNamespace(microseconds=microseconds)
    event.listen(
        engine.sync_engine,
        "connect",
        lambda connection, _record: connection.create_function("julianday", 1, TestNow(clock)),
    )
    return ShopBroker(engine, logger=None)


def _fill(connection: Connection, tables: Any) -> None:
    for row in _live():
        connection.execute(insert(tables.message).values(payload=b"{}", **row))
    for row in _archived():
        connection.execute(insert(tables.archive).values(payload=b"{}", **row))
    for row in _states():
        connection.execute(insert(tables.policy_state).values(**row))


def _live() -> Iterator[dict[str, Any]]:
    for n in range(40):
        at = ago(25 - n / 2)
        row = {"queue": "orders", "created_at": at, "next_attempt_at": at, "key": f"order-{n}"}
        tried = {"state": "RETRYABLE", "attempts_count": 2, "deliveries_count": 2}
        times = {"first_attempt_at": ago(20), "last_attempt_at": ago(12), "last_error": NO_ROUTE}
        late = {"next_attempt_at": NOW + timedelta(minutes=4)}
        if n % 2:
            row |= {**tried, **times, **(late if n % 4 == 1 else {})}
        yield {"id": 4700 + n, **row}
    running = {
        "state": "PROCESSING",
        "lease_token": uuid.UUID(bytes=HOLDER + bytes(8)),
        "lease_expires_at": NOW + timedelta(seconds=48),
        "acquired_at": ago(0.2),
        "deliveries_count": 1,
    }
    at = ago(3)
    yield {"id": 4740, "queue": "email", "created_at": at, "next_attempt_at": at, **running}
    for n in range(3):
        at = ago(2 - n / 2)
        yield {"id": 4741 + n, "queue": "ordres", "created_at": at, "next_attempt_at": at}
    for n in range(4):
        at = ago(8 - 2 * n)
        times = {"created_at": at, "next_attempt_at": at + timedelta(minutes=10)}
        yield {"id": 4744 + n, "queue": "newsletter", "policy_marks": HELD_DELAY, **times}


def _archived() -> Iterator[dict[str, Any]]:
    for n in range(24):
        at = ago(150 - 6 * n)
        row = {"queue": "orders", "created_at": ago(240), "next_attempt_at": at, "archived_at": at}
        row |= {"attempts_count": 5, "deliveries_count": 5, "state": "FAILED"}
        error = INVALID if n % 8 == 0 else NO_ROUTE
        reason = "invalid_body" if n % 8 == 0 else "max_attempts"
        mark = ("2c26b46b68ffc68f" if n % 8 == 0 else "9f86d081884c7d65")[:FINGERPRINT_LENGTH]
        row |= {"last_error": error, "reason": reason, "error_fingerprint": mark}
        yield {"id": 4600 + n, **row}
    for n in range(5):
        at = ago(0.8 - n / 8)
        row = {"queue": "email", "created_at": at, "next_attempt_at": at, "archived_at": at}
        yield {"id": 4690 + n, "state": "COMPLETED", "attempts_count": 1, **row}


def _states() -> Iterator[dict[str, Any]]:
    info = build_description(
        queues=["orders", "email"],
        max_workers=10,
        ordered=False,
        policies=[],
        paused=False,
        stopping=False,
    )
    soon = {"lease_expires_at": NOW + timedelta(seconds=15), "created_at": ago(600)}
    yield {"scope": SUBSCRIBER, "key": WORKER, "info": info, **soon}
    delayed: dict[str, Any] = {
        "policies": [Delay("10m")],
        "max_workers": 1,
        "queues": ["newsletter"],
    }
    flags: dict[str, Any] = dict.fromkeys(("ordered", "paused", "stopping"), False)
    yield {
        "scope": SUBSCRIBER,
        "key": SENDER,
        "info": build_description(**delayed, **flags),
        **soon,
    }
    started = {"created_at": ago(90), "lease_expires_at": ago(89), "lease_token": uuid.UUID(int=1)}
    payment = {"key": "order-17", "worker": "shop-5c1b:23"}
    yield {"scope": f"{ACK_FIRST}payments", "key": "4411", "info": payment, **started}
    held = {"created_at": ago(5), "lease_expires_at": NOW + timedelta(seconds=20), "counter": 12}
    holder = {"info": {"worker": WORKER}, "lease_token": uuid.UUID(int=2)}
    yield {"scope": LOCK, "key": "stock-count", **held, **holder}
    night = ScheduleState("0 2 * * *", "UTC", ago(-1005), ago(435))
    yield {"scope": SCHEDULE, "key": "nightly report", "info": night.dump(), "created_at": ago(1)}
    for job in _jobs():
        assert job.created_at is not None
        row = {"key": job.id, "info": dump_job(job), "created_at": job.created_at}
        yield {"scope": JOB, **row}


def _jobs() -> Iterator[Job]:
    yield Job(
        id="20260302-080211-482913-9c2f",
        action=REDRIVE,
        by="Ann",
        filters=Filters(archived=True, state=MessageState.FAILED, queue="orders"),
        state="ended",
        expected=2311,
        done=2309,
        skipped=2,
        created_at=ago(73),
        ended_at=ago(70),
    )
    yield Job(
        id="20260302-084500-117204-03be",
        action=MOVE,
        by="Bob",
        filters=Filters(queue="ordres"),
        arguments={"to": "orders"},
        state="ended",
        expected=18,
        done=17,
        skipped=1,
        created_at=ago(30),
        ended_at=ago(30),
    )
    yield Job(
        id="20260302-090310-900121-6d41",
        action="pause",
        by="Ann",
        arguments={"queue": "newsletter"},
        state="ended",
        expected=1,
        done=1,
        created_at=ago(12),
    )
