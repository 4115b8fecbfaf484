"""The engine's JSON codec belongs to the application: the broker reads and writes with its own."""

import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Column, MetaData, String, Table, insert, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.types import JSON

from faststream_sqlbroker import SqlBroker, SqlBrokerMessage
from faststream_sqlbroker.database import overviews
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.schema.types import BrokerJson
from tests.conftest import OTHER_DRIVERS
from tests.faststream.conftest import QUICK, Heard, clean_up
from tests.helpers import eventually
from tests.quick_tables import TABLES

HEADERS = {"a": {"b": [1, None]}, "x": "y"}


def refuse(_value: object) -> str:
    """A codec that takes models only."""
    raise TypeError("only models")


def to_objects(stored: str | bytes) -> Any:
    """Give objects with attributes in place of dicts."""
    return json.loads(stored, object_hook=lambda fields: SimpleNamespace(**fields))


CODECS: dict[str, Any] = {
    "refuses": {"json_serializer": refuse},
    "objects": {"json_deserializer": to_objects},
}


def _drivers() -> Iterator[Any]:
    """The default drivers, and psycopg, which decodes JSON itself, too."""
    for kind in ("sqlite", "postgresql", "mariadb", "mysql"):
        yield pytest.param(kind, None, id=kind)
    assert "postgresql" in OTHER_DRIVERS["psycopg"]
    yield pytest.param("postgresql", "postgresql+psycopg", id="psycopg")


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CODECS[request.param]


@pytest.fixture
async def app_engine(
    database_url: str, engine: AsyncEngine, driver: str | None, codec: dict[str, Any]
) -> AsyncIterator[AsyncEngine]:
    """The application's engine, with the codec that it needs."""
    url = engine.url.set(drivername=driver) if driver else database_url
    options = {"connect_args": {"timeout": 60}} if engine.dialect.name == "sqlite" else {}
    made = create_async_engine(url, **options, **codec)
    yield made
    await made.dispose()


@pytest.fixture
async def broker(app_engine: AsyncEngine, logger: Any) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(app_engine, logger=logger, graceful_timeout=60.0, presence_interval=0.2)
    await broker.create_tables()
    yield broker
    await clean_up(broker)


everywhere = pytest.mark.parametrize(("database", "driver"), [*_drivers()], indirect=["database"])


@everywhere
async def test_signs_of_life_and_pauses_work(
    broker: SqlBroker, engine: AsyncEngine, heard: Heard
) -> None:
    """A pause by a process with the usual codec reaches the workers, and theirs reach it."""

    subscriber: Any = broker.subscriber("q", **QUICK)

    @subscriber
    async def handle() -> None: ...

    operator = SqlBroker(engine, logger=None)
    await broker.start()
    await eventually(lambda: operator.admin.subscribers("q"))
    await operator.admin.pause("q", by="ada")

    await eventually(lambda: subscriber.consumer.registration.open_queues == ())
    assert [(p.queue, p.by) for p in await broker.admin.paused()] == [("q", "ada")]
    assert [s.queues for s in await broker.admin.subscribers("q")] == [("q",)]
    assert not heard.texts("failed")


@everywhere
async def test_headers_reach_handlers_and_operators(broker: SqlBroker) -> None:
    """They are read and written as they were given, in every way there is."""
    seen: list[Any] = []

    @broker.subscriber("q", retry_strategy=None, **QUICK)
    async def handle(message: SqlBrokerMessage) -> None:
        seen.append({name: message.headers.get(name) for name in HEADERS})
        raise ValueError

    await broker.publish("x", "q", headers=HEADERS)
    await broker.publish("x", "later", headers=HEADERS, lookup="l", info="i", delay="1h")
    async with broker.engine.begin() as connection:
        await broker.publish("x", "later", headers=HEADERS, delay="1h", connection=connection)
    [mirrored] = await broker.admin.mirrored(lookup="l", info="i")
    assert {**mirrored.headers, **HEADERS} == mirrored.headers

    await broker.start()
    await eventually(lambda: len(seen) == 1)

    async def archived() -> list[Any]:
        return list((await broker.admin.messages(archived=True, bodies=True)).messages)

    [ended] = await eventually(archived)
    waiting = (await broker.admin.messages(bodies=True)).messages
    assert len(waiting) == 2
    for message in (ended, *waiting):
        assert {**message.headers, **HEADERS} == message.headers
    await broker.admin.redrive(queue="q", dry_run=False)
    await eventually(lambda: len(seen) == 2)
    assert seen == [HEADERS, HEADERS]


@everywhere
async def test_operators_see_and_change_what_the_broker_keeps(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks, schedules and jobs are stored as JSON; the server estimates counts."""
    monkeypatch.setattr(overviews, "MAX_COUNTED", 0)
    await broker.publish_batch(*range(3), queue="q")
    [queue] = await broker.admin.queues()
    assert queue.queue == "q"
    async with broker.lock("k"):
        [lock] = await broker.admin.locks()
    assert lock.key == "k"
    job = await broker.admin.bulk_cancel(queue="q", dry_run=False)
    assert (job.state, job.done) == ("ended", 3)
    assert await broker.admin.audit() == [job]


@everywhere
async def test_rows_of_any_codec_stay_readable(broker: SqlBroker, engine: AsyncEngine) -> None:
    """A row that SQLAlchemy's own JSON type has written is read, and the other way round."""
    table = TABLES.policy_state
    plain = Table(table.name, MetaData(), *(Column(n, String) for n in ("scope", "key")))
    plain.append_column(Column("info", JSONB if engine.dialect.name == "postgresql" else JSON))
    old = {"scope": "s", "key": "old", "info": {"caf\u00e9": 1}}
    async with engine.begin() as connection:
        await connection.execute(insert(plain), [old])
    async with broker.engine.begin() as connection:
        own = {"scope": "s", "key": "new", "info": {"caf\u00e9": [None]}}
        await connection.execute(insert(table), [own])
        none = {"scope": "s", "key": "none", "info": None}
        await connection.execute(insert(table), [none])
        rows = await connection.execute(select(table.c.key, table.c.info))
        assert {row.key: row.info for row in rows} == {
            "old": {"caf\u00e9": 1},
            "new": {"caf\u00e9": [None]},
            "none": None,
        }
        nulls = await connection.execute(select(table.c.key).where(table.c.info.is_(None)))
        assert nulls.scalars().all() == ["none"]
    async with engine.connect() as connection:
        of_new = select(plain.c.info).where(plain.c.key == "new")
        assert (await connection.execute(of_new)).scalar_one() == {"caf\u00e9": [None]}


def test_every_json_column_has_the_brokers_codec() -> None:
    """A new column cannot depend on the engine's codec."""
    tables = build_tables(SqlBrokerSchemaConfig()).broker_tables
    columns = [c for table in tables for c in table.columns if c.type._type_affinity is JSON]
    assert columns
    assert all(isinstance(column.type, BrokerJson) for column in columns)
