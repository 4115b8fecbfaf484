"""`max_fetch_interval=None`: PostgreSQL's triggers tell of everything, and nothing is asked."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from faststream_sqlbroker import SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.exceptions import NotSupportedError, SchemaError, SetupError
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.schema.triggers import create_notify_trigger
from faststream_sqlbroker.subscriber.options import make_settings
from tests.clock import VirtualTime
from tests.faststream.conftest import Look
from tests.faststream.idle import Statements, pass_time
from tests.helpers import eventually

TOLD: Any = {"max_fetch_interval": None, "flush_interval": 0.01}
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
INSERT = "INSERT INTO message (queue, payload) VALUES ('q', :body)"


@pytest.fixture
async def triggers(broker: SqlBroker) -> AsyncIterator[None]:
    tables = build_tables(SqlBrokerSchemaConfig(notify_trigger=True))
    async with broker.engine.begin() as connection:
        await connection.run_sync(create_notify_trigger, tables)
    yield
    async with broker.engine.begin() as connection:
        await connection.execute(text("DROP FUNCTION message_notify CASCADE"))


class Told:
    """A broker whose only subscriber is told, and what it got."""

    def __init__(self, broker: SqlBroker) -> None:
        self.broker = broker
        self.got = list[str]()

    async def start(self, **options: Any) -> None:
        """Start, and wait until it waits for nothing but wake-ups."""

        @self.broker.subscriber("q", **TOLD, **options)
        async def handle(body: str) -> None:
            self.got.append(body)
            if body == "again" and self.got.count(body) == 1:
                raise ValueError(body)

        self.subscriber = self.broker.subscribers[-1]
        await self.broker.start()
        await eventually(lambda: self.broker._wakeups.is_listening)
        await self.asleep()

    async def asleep(self) -> None:
        """Wait until nothing but a wake-up or a known time makes it look."""
        fetcher = self.subscriber._consumer._fetcher  # type: ignore[attr-defined]
        await eventually(lambda: fetcher.ready.has_nothing_due)

    async def execute(self, sql: str, **binds: Any) -> None:
        async with self.broker.engine.begin() as connection:
            await connection.execute(text(sql), binds)


@pytest.fixture
def told(broker: SqlBroker, triggers: None) -> Told:
    return Told(broker)


@pytest.mark.capability("`max_fetch_interval=None`: an idle process sends no statement")
@postgresql_only
async def test_an_idle_process_sends_nothing(broker: SqlBroker, triggers: None) -> None:
    broker._clock.use(time := VirtualTime())
    statements = Statements(broker)
    for number in range(5):

        @broker.subscriber(f"q{number}", max_fetch_interval=None)
        async def handle(_body: str) -> None: ...

    broker.publish_on_schedule("yearly", "0 0 1 1 *", "q0")
    await broker.start()
    await eventually(lambda: broker._wakeups.is_listening)
    await pass_time(broker, time, 60.0)
    assert statements.total() > 0
    statements.clear()
    await pass_time(broker, time, 600.0)
    assert statements.total() == 0, statements.most_common()
    await pass_time(broker, time, 3600.0)
    assert 1 <= statements.total() <= 30, "a look an hour, with what it carries"


@postgresql_only
async def test_a_foreign_insert_is_told(told: Told) -> None:
    await told.start()
    await told.execute(INSERT, body=b"now")
    await eventually(lambda: told.got == ["now"])


@postgresql_only
async def test_a_message_that_is_due_later_has_a_timer(told: Told, look: Look) -> None:
    await told.start()
    later = "INSERT INTO message (queue, payload, next_attempt_at) "
    later += "VALUES ('q', 'later', now() + interval '0.5 seconds')"
    await told.execute(later)
    [row] = await look.archived()
    assert told.got == ["later"]
    assert row["acquired_at"] >= row["next_attempt_at"]


@postgresql_only
async def test_a_retry_is_told(told: Told, look: Look) -> None:
    strategy = ConstantRetryStrategy(delay_seconds=0.5, max_attempts=3)
    await told.start(retry_strategy=strategy)
    await told.execute(INSERT, body=b"again")
    await eventually(lambda: told.got == ["again", "again"])
    await look.archived()


@postgresql_only
async def test_what_another_process_gives_back_is_told(told: Told) -> None:
    store = told.broker._store
    await store.insert([NewMessage("q", b"back")])
    token = uuid4()
    assert len(await store.claim(await store.find_ready_pairs(["q"]), 1, 600.0, token)) == 1
    await told.start()
    assert await store.release_claim(["q"], token) == 1
    await eventually(lambda: told.got == ["back"])


@postgresql_only
async def test_the_lease_of_a_dead_process_has_a_timer(told: Told, look: Look) -> None:
    """A killed process cannot tell of its end."""
    store = told.broker._store
    await store.insert([NewMessage("q", b"left")])
    assert len(await store.claim(await store.find_ready_pairs(["q"]), 1, 1.0, uuid4())) == 1
    [left] = await look.rows()
    await told.start()
    [row] = await look.archived()
    assert told.got == ["left"]
    assert row["acquired_at"] >= left["lease_expires_at"]


@postgresql_only
async def test_a_lost_listener_looks_when_it_is_back(told: Told) -> None:
    await told.start()
    store = told.broker._store
    # The message comes while no connection listens, and its wake-up is lost.
    await told.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' "
        "AND datname = current_database()"
    )
    await store.insert([NewMessage("q", b"missed")])
    await eventually(lambda: told.got == ["missed"])
    await eventually(lambda: told.broker._wakeups.is_listening)
    await told.asleep()
    await told.execute(INSERT, body=b"heard")
    await eventually(lambda: told.got == ["missed", "heard"])


@postgresql_only
async def test_it_is_refused_without_triggers(broker: SqlBroker) -> None:
    @broker.subscriber("q", **TOLD)
    async def handle(_body: str) -> None: ...

    with pytest.raises(SchemaError, match="notify_trigger=True"):
        await broker.start()


@pytest.mark.parametrize("database", ["sqlite", "mysql", "mariadb"], indirect=True)
async def test_it_is_refused_where_nothing_is_told(broker: SqlBroker) -> None:
    @broker.subscriber("q", **TOLD)
    async def handle(_body: str) -> None: ...

    with pytest.raises(NotSupportedError, match="max_fetch_interval=None needs PostgreSQL"):
        await broker.start()


@pytest.mark.parametrize(
    "options", [{"wakeup": "poll"}, {"policies": [Once(ttl=60)]}], ids=["poll", "policies"]
)
def test_it_is_refused_with_what_is_not_told(options: Any) -> None:
    with pytest.raises(SetupError, match="max_fetch_interval=None"):
        make_settings("q", {**TOLD, **options})
