"""Rights are checked at the start, and what is refused later stops claims until it is granted."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    AccessError,
    Concurrency,
    Debounce,
    Delay,
    Once,
    RightsError,
    SqlBroker,
    SqlBrokerResponse,
    SqlBrokerSchemaConfig,
    StoreError,
    Throttle,
)
from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.flow.deliver.outcomes import MAX_QUARANTINED
from faststream_sqlbroker.flow.fleet import rights
from tests.accounts import Account, account
from tests.clock import ShiftedTime
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually

SERVERS = ["postgresql", "mariadb", "mysql"]
servers_only = pytest.mark.parametrize("database", SERVERS, indirect=True)
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
sqlite_only = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
CURE = re.compile(r": (GRANT [^;]+);")


@pytest.fixture
def user(database_url: str, broker: SqlBroker) -> Iterator[Account]:
    """A user without rights, in a database with the tables."""
    with account(database_url) as user:
        yield user


@pytest.fixture
async def its_engine(user: Account) -> AsyncIterator[AsyncEngine]:
    engine = user.engine()
    yield engine
    await engine.dispose()


@pytest.fixture
async def its_broker(its_engine: AsyncEngine, logger: Any) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(its_engine, logger=logger, graceful_timeout=60.0)
    yield broker
    await broker.stop()


async def refusal(broker: SqlBroker) -> str:
    with pytest.raises(RightsError) as caught:
        await broker.start()
    assert not broker.running
    return str(caught.value)


async def start_with_what_it_asks_for(broker: SqlBroker, user: Account) -> list[str]:
    """Grant what the error of the start says, and nothing else; the statements."""
    said = await refusal(broker)
    assert user.who in said
    grants = CURE.findall(said)
    assert grants
    user.execute(*grants)
    await broker.start()
    return grants


def produces(broker: SqlBroker) -> None:
    broker.publisher("q")


def consumes(broker: SqlBroker) -> None:
    """Every kind of subscriber that writes no message."""
    many: Any = {"max_workers": 3, **QUICK}

    @broker.subscriber("plain", **many)
    @broker.subscriber("batch", batch=True, **many)
    @broker.subscriber("ordered", ordered=True, **many)
    @broker.subscriber("transactional", transactional=True, **many)
    @broker.subscriber("first", ack_policy=AckPolicy.ACK_FIRST, **many)
    @broker.subscriber(
        "limits", policies=[Throttle(100, "1s", key=True), Concurrency(5), Once("1m")], **many
    )
    @broker.subscriber("debounced", policies=[Delay("1ms"), Debounce("1ms")], **many)
    async def handle(body: Any) -> None: ...

    @broker.subscriber("fails", retry_strategy=None, dead_letter_queue="plain", **many)
    async def fail(body: Any) -> None:
        raise ValueError

    broker.subscriber("forwarded", forward_to="plain", **QUICK)


def answers(broker: SqlBroker) -> None:
    @broker.subscriber("plain", **QUICK)
    @broker.publisher("elsewhere")
    async def handle(body: Any) -> str:
        return "answer"


def schedules(broker: SqlBroker) -> None:
    broker.publish_on_schedule("tick", "* * * * * *", "ticks", "tick")


KINDS: list[Callable[[SqlBroker], None]] = [produces, consumes, answers, schedules]


async def publish_all(broker: SqlBroker, engine: AsyncEngine) -> None:
    """In every way that a producer has."""
    assert await broker.publish("x", "q") is not None
    assert await broker.publish(
        "x", "q", key="k", priority=3, headers={"a": 1}, delay=1, expires_in=60
    )
    assert await broker.publish("x", "q", dedup_id="d") is not None
    assert await broker.publish("x", "q", dedup_id="d") is None
    assert len(await broker.publish_batch("a", "b", queue="q")) == 2
    different = SqlBrokerResponse("a", priority=1), SqlBrokerResponse("b", dedup_id="e")
    assert len(await broker.publish_batch(*different, queue="q")) == 2
    many = [broker.publish("x", f"q{n % 2}", priority=n, key=f"k{n}") for n in range(12)]
    ids = await asyncio.gather(*many)
    assert len(set(ids)) == 12
    async with engine.begin() as connection:
        assert await broker.publish("x", "q", connection=connection)
        assert len(await broker.publish_batch("a", "b", queue="q", connection=connection)) == 2


# -- the start -------------------------------------------------------------------------------------


@servers_only
async def test_a_producer_needs_a_producers_rights(
    user: Account, its_broker: SqlBroker, its_engine: AsyncEngine, look: Look
) -> None:
    produces(its_broker)
    await start_with_what_it_asks_for(its_broker, user)
    await publish_all(its_broker, its_engine)
    ids = [row["id"] for row in await look.rows()]
    assert len(ids) == 22
    refused = user.try_as(
        "SELECT payload FROM message",
        "UPDATE message SET payload = 'x'",
        "DELETE FROM message",
        "INSERT INTO message (queue, payload, state) VALUES ('q', 'x', 'PENDING')",
        "SELECT id FROM message_archive",
        "SELECT scope FROM message_policy_state",
    )
    assert len(refused) == 6


@servers_only
async def test_a_consumer_needs_a_consumers_rights(
    user: Account, its_broker: SqlBroker, broker: SqlBroker, look: Look
) -> None:
    consumes(its_broker)
    await start_with_what_it_asks_for(its_broker, user)
    queues = [queue for subscriber in its_broker.subscribers for queue in subscriber.queues]  # type: ignore[attr-defined]
    for queue in queues:
        for key in "ab":
            await broker.publish(queue, queue, key=key)
    await look.archived(2 * len(queues))
    assert await its_broker.ping(60.0)
    assert user.try_as(
        "INSERT INTO message (queue, payload) VALUES ('q', 'x')", "SELECT id FROM message_archive"
    )


@servers_only
async def test_a_consumer_that_answers_may_publish(
    user: Account, its_broker: SqlBroker, broker: SqlBroker, look: Look
) -> None:
    answers(its_broker)
    await start_with_what_it_asks_for(its_broker, user)
    await broker.publish("x", "plain")

    async def answered() -> bool:
        return [row["queue"] for row in await look.rows()] == ["elsewhere"]

    await eventually(answered)


@servers_only
async def test_schedules_need_no_rights_of_a_consumer(
    user: Account, its_broker: SqlBroker, look: Look
) -> None:
    schedules(its_broker)
    await start_with_what_it_asks_for(its_broker, user)
    await eventually(look.rows)
    assert user.try_as("DELETE FROM message_policy_state", "UPDATE message SET payload = 'x'")


@servers_only
@pytest.mark.capability("rights checked at the start, each that is missing named with its GRANT")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_every_right_that_is_missing_is_named(
    user: Account, its_broker: SqlBroker, kind: Callable[[SqlBroker], None]
) -> None:
    """All at once in the first error, and each that is taken away by itself."""
    kind(its_broker)
    grants = await start_with_what_it_asks_for(its_broker, user)
    await its_broker.stop()
    for grant in grants:
        what, _, on = grant.removeprefix("GRANT ").rpartition(" ON ")
        for right in re.findall(r"[A-Z]+(?: \([^)]+\))?", what):
            where = on.partition(" TO ")[0]
            user.execute(f"REVOKE {right} ON {where} FROM {user.who}")
            said = await refusal(its_broker)
            assert CURE.findall(said) == [f"GRANT {right} ON {on}"], said
            user.execute(f"GRANT {right} ON {on}")
    await its_broker.start()


@servers_only
async def test_only_the_columns_that_are_missing_are_named(
    user: Account, its_broker: SqlBroker
) -> None:
    produces(its_broker)
    [grant, *_more] = await start_with_what_it_asks_for(its_broker, user)
    await its_broker.stop()
    user.execute("REVOKE " + grant.removeprefix("GRANT ").replace(" TO ", " FROM "))
    user.execute(re.sub(r"dedup_id, |, expires_at", "", grant))
    said = await refusal(its_broker)
    table = grant.partition(" ON ")[2]
    assert CURE.findall(said) == [f"GRANT INSERT (dedup_id, expires_at) ON {table}"]
    user.execute(*CURE.findall(said))
    await its_broker.start()


async def test_the_rehearsal_changes_nothing_and_waits_for_no_row(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    """Of everything that a process may do, while other transactions hold all rows."""
    await broker.publish_batch("a", "b", queue="q")
    await broker.pop("q")
    async with broker.lock("key"):
        pass
    tables = ("message", "message_archive", "message_policy_state")

    async def rows() -> list[Any]:
        async with engine.connect() as connection:
            return [list(await connection.execute(text(f"SELECT * FROM {t}"))) for t in tables]

    before = await rows()
    assert all(before)
    async with engine.connect() as other:
        locks = "" if engine.dialect.name == "sqlite" else " FOR UPDATE"
        for table in tables:
            await other.execute(text(f"SELECT * FROM {table}{locks}"))
        async with asyncio.timeout(60):
            access = await broker._store.access.find_missing_rights(frozenset(Activity))
    assert not access.missing
    assert await rows() == before


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("activity", [Activity.OPERATE, Activity.REPAIR, Activity.CONSUME])
async def test_the_rehearsal_waits_for_another_writer(
    engine: AsyncEngine, broker: SqlBroker, activity: Activity
) -> None:
    """SQLite refuses at once a transaction that has read first and then writes."""
    async with engine.connect() as other:
        await other.exec_driver_sql("BEGIN IMMEDIATE")
        asking = asyncio.create_task(
            broker._store.access.find_missing_rights(frozenset({activity}))
        )
        await asyncio.sleep(1)
        assert not asking.done()
        await other.rollback()
        async with asyncio.timeout(60):
            assert not (await asking).missing


@servers_only
async def test_without_an_archive_it_needs_no_right(user: Account, its_engine: AsyncEngine) -> None:
    """Nor on an archive to which this process writes nothing."""
    config = SqlBrokerSchemaConfig(message_archive_table_name=None)
    for options in ({"schema": config}, {}):
        broker = SqlBroker(its_engine, logger=None, **options)  # type: ignore[arg-type]

        @broker.subscriber(
            "q", retain_in_archive_on_ack=False, retain_in_archive_on_reject=False, **QUICK
        )
        async def handle(body: Any) -> None: ...

        assert "archive" not in await refusal(broker)
        await broker.stop()


@servers_only
async def test_a_subscriber_that_is_added_later_is_checked(
    user: Account, its_broker: SqlBroker
) -> None:
    produces(its_broker)
    await start_with_what_it_asks_for(its_broker, user)
    late = its_broker.subscriber("q", **QUICK)

    @late
    async def handle(body: Any) -> None: ...

    with pytest.raises(RightsError, match="SELECT, UPDATE, DELETE on"):
        await late.start()
    assert late.running is False


@postgresql_only
async def test_a_schema_that_may_not_be_used(user: Account, its_broker: SqlBroker) -> None:
    produces(its_broker)
    user.execute(
        "REVOKE USAGE ON SCHEMA public FROM PUBLIC", "GRANT INSERT, SELECT ON message TO {who}"
    )
    try:
        said = await refusal(its_broker)
        assert CURE.findall(said) == [f"GRANT USAGE ON SCHEMA public TO {user.name}"]
        user.execute(*CURE.findall(said))
        assert CURE.findall(await refusal(its_broker)) == [
            f"GRANT USAGE ON SEQUENCE public.message_id_seq TO {user.name}"
        ]
    finally:
        user.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")


@postgresql_only
async def test_tables_in_a_schema_of_their_own(
    user: Account, its_engine: AsyncEngine, engine: AsyncEngine
) -> None:
    schema = SqlBrokerSchemaConfig(
        schema="Odd_One", message_table_name="Order", message_archive_table_name=None
    )
    user.execute('CREATE SCHEMA "Odd_One"')
    await SqlBroker(engine, schema=schema, logger=None).create_tables()
    broker = SqlBroker(its_engine, schema=schema, logger=None)
    produces(broker)
    assert CURE.findall(await refusal(broker)) == [
        f'GRANT USAGE ON SCHEMA "Odd_One" TO {user.name}'
    ]
    user.execute(f'GRANT USAGE ON SCHEMA "Odd_One" TO {user.name}')
    grants = await start_with_what_it_asks_for(broker, user)
    assert all('"Odd_One"."Order' in grant for grant in grants)
    many = await asyncio.gather(*(broker.publish("x", "q", priority=n) for n in range(5)))
    assert len(set(many)) == 5
    await broker.stop()


@sqlite_only
async def test_a_file_that_cannot_be_written(database_url: str, broker: SqlBroker) -> None:
    name = database_url.partition("///")[2]
    engine = create_async_engine(f"sqlite+aiosqlite:///file:{name}?mode=ro&uri=true")
    reader = SqlBroker(engine, logger=None)
    produces(reader)
    said = await refusal(reader)
    assert name in said
    assert "which is read-only" in said
    await reader.stop()
    await engine.dispose()


@pytest.mark.parametrize("database", ["pgbouncer"], indirect=True)
async def test_through_pgbouncer(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None, pgbouncer=True)
    await broker.create_tables()
    consumes(broker)
    for _ in range(3):
        await broker.start()
        assert await broker.ping(60.0)
        await broker.stop()


# -- later -----------------------------------------------------------------------------------------


async def test_ping_is_false_while_a_table_is_missing(
    engine: AsyncEngine, broker: SqlBroker
) -> None:
    """Of a process, too, that has nothing to do."""
    await broker.start()
    assert await broker.ping(60.0)
    await _execute(engine, "ALTER TABLE message RENAME TO away")
    assert not await broker.ping(5.0)
    await _execute(engine, "ALTER TABLE away RENAME TO message")
    assert await broker.ping(60.0)


@servers_only
async def test_ping_of_a_producer_is_false_while_the_table_is_missing(
    user: Account, its_broker: SqlBroker, engine: AsyncEngine
) -> None:
    """It may not read the table."""
    produces(its_broker)
    await start_with_what_it_asks_for(its_broker, user)
    assert await its_broker.ping(60.0)
    await _execute(engine, "ALTER TABLE message RENAME TO away")
    assert not await its_broker.ping(5.0)
    await _execute(engine, "ALTER TABLE away RENAME TO message")
    await eventually(lambda: its_broker.ping(5.0))


async def test_tables_may_come_after_the_start(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None, validate_schema_on_start=False)
    await broker.start()
    assert not await broker.ping(5.0)
    await broker.create_tables()
    assert await broker.ping(60.0)
    assert await broker.publish("x", "q")
    await broker.stop()


@servers_only
async def test_ping_tells_of_a_publish_that_is_refused(
    user: Account, its_broker: SqlBroker, heard: Heard
) -> None:
    produces(its_broker)
    grants = await start_with_what_it_asks_for(its_broker, user)
    assert await its_broker.ping(60.0)
    user.execute("REVOKE INSERT ON message FROM {who}" if user.postgresql else REVOKED)
    with pytest.raises(AccessError):
        await its_broker.publish("x", "q")
    assert not await its_broker.ping(5.0)
    await eventually(lambda: heard.texts("GRANT INSERT"))
    assert not await its_broker.ping(5.0)
    user.execute(*grants)
    await eventually(lambda: its_broker.ping(5.0))
    await its_broker.publish("x", "q")


@sqlite_only
async def test_a_file_that_cannot_be_written_for_a_while(database_url: str) -> None:
    """Connections opened in that time are not used again."""
    engine = create_async_engine(database_url)
    read_only = asyncio.Event()

    @event.listens_for(engine.sync_engine, "connect")
    def connected(driver: Any, _record: Any) -> None:
        driver.execute(f"PRAGMA query_only = {int(read_only.is_set())}")

    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    await broker.start()
    read_only.set()
    await engine.dispose()
    with pytest.raises(StoreError):
        await broker.publish("x", "q")
    assert not await broker.ping(5.0)
    read_only.clear()
    await eventually(lambda: broker.ping(5.0))
    assert await broker.publish("x", "q")
    await broker.stop()
    await engine.dispose()


@servers_only
async def test_a_publish_refused_before_the_start(user: Account, its_broker: SqlBroker) -> None:
    await its_broker.connect()
    with pytest.raises(AccessError):
        await its_broker.publish("x", "q")
    assert not await its_broker.ping(5.0)
    user.execute("GRANT SELECT, INSERT ON message TO {who}")
    if user.postgresql:
        user.execute("GRANT USAGE ON SEQUENCE message_id_seq TO {who}")
    await eventually(lambda: its_broker.ping(5.0))


class Gate:
    """A subscriber whose third message ends when `spoil` has been done, and the next when claims
    are held."""

    def __init__(self, broker: SqlBroker, **options: Any) -> None:
        self.handled: list[int] = []
        self.third = asyncio.Event()
        self.spoiled = asyncio.Event()
        self.known = asyncio.Event()
        options |= QUICK

        @broker.subscriber("q", fetch_batch_size=10, **options)
        async def handle(number: int) -> None:
            self.handled.append(number)
            if len(self.handled) == 3:
                self.third.set()
                await self.spoiled.wait()
            elif len(self.handled) > 3:
                await self.known.wait()

        [self.subscriber] = broker.subscribers

    async def hold(
        self, broker: SqlBroker, spoil: Callable[[], Awaitable[None]], look: Look
    ) -> None:
        """Publish 50 messages, and `spoil` something; returns when nothing is claimed any more."""
        await broker.publish_batch(*range(50), queue="q")
        await asyncio.wait_for(self.third.wait(), 60)
        await spoil()
        self.spoiled.set()
        await eventually(lambda: not getattr(self.subscriber, "healthy", True))
        self.known.set()

        async def given_back() -> bool:
            rows = await look.rows()
            return len([row for row in rows if row["state"] == "PROCESSING"]) <= len(self.handled)

        await eventually(given_back)


@servers_only
@pytest.mark.parametrize("transactional", [False, True])
async def test_no_handler_starts_whose_outcome_cannot_be_written(
    user: Account,
    its_broker: SqlBroker,
    broker: SqlBroker,
    look: Look,
    heard: Heard,
    transactional: bool,
) -> None:
    """The right to write the archive is withdrawn while 50 messages are handled."""
    gate = Gate(its_broker, transactional=transactional)
    await start_with_what_it_asks_for(its_broker, user)

    async def withdraw() -> None:
        user.execute("REVOKE INSERT ON message_archive FROM {who}")

    await gate.hold(broker, withdraw, look)
    await eventually(lambda: heard.texts("GRANT INSERT ON"))
    count = len(gate.handled)
    assert count <= 5
    for _ in range(5):
        assert not await its_broker.ping(5.0)
    assert len(gate.handled) == count
    user.execute("GRANT INSERT ON message_archive TO {who}")
    rows = await look.archived(50)
    assert {row["state"] for row in rows} == {"COMPLETED"}
    # In a transaction an attempt whose ack is refused has done nothing, and is repeated.
    assert sorted(gate.handled if not transactional else set(gate.handled)) == list(range(50))
    await eventually(lambda: its_broker.ping(5.0))


@postgresql_only
async def test_claims_stop_for_a_reason_that_cannot_be_asked_for(
    user: Account, its_broker: SqlBroker, broker: SqlBroker, look: Look
) -> None:
    """Row security says 42501 of each row, whatever rights the role has."""
    gate = Gate(its_broker)
    await start_with_what_it_asks_for(its_broker, user)

    async def secure() -> None:
        # ALTER TABLE waits for open transactions of the broker, which need this event loop.
        await asyncio.to_thread(
            user.execute, "ALTER TABLE message_archive ENABLE ROW LEVEL SECURITY"
        )

    await gate.hold(broker, secure, look)
    assert len(gate.handled) <= 5
    assert not await its_broker.ping(5.0)
    await asyncio.to_thread(user.execute, "ALTER TABLE message_archive DISABLE ROW LEVEL SECURITY")
    await look.archived(50)
    assert sorted(gate.handled) == list(range(50)), "a handler was repeated"
    await eventually(lambda: its_broker.ping(5.0))


async def test_a_missing_archive_stops_claims(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    gate = Gate(broker)
    await broker.start()

    async def remove() -> None:
        await _execute(engine, "ALTER TABLE message_archive RENAME TO away")

    await gate.hold(broker, remove, look)
    assert len(gate.handled) <= 5
    assert not await broker.ping(5.0)
    await _execute(engine, "ALTER TABLE away RENAME TO message_archive")
    rows = await look.archived(50)
    assert {row["state"] for row in rows} == {"COMPLETED"}
    assert sorted(gate.handled) == list(range(50)), "a handler was repeated"
    await eventually(lambda: broker.ping(5.0))


@servers_only
async def test_an_answer_without_a_grant_stops_no_other_message(
    user: Account, its_broker: SqlBroker, broker: SqlBroker, look: Look
) -> None:
    """A producer asks for an answer, and the consumer may not publish: that message is nacked."""

    @its_broker.subscriber("q", retry_strategy=None, **QUICK)
    async def handle(body: str) -> str:
        return body

    await start_with_what_it_asks_for(its_broker, user)
    await broker.publish("asks", "q", reply_to="answers")
    await broker.publish_batch(*(f"plain {n}" for n in range(20)), queue="q")

    async def done() -> bool:
        return len(await look.rows(archive=True)) >= 20

    await eventually(done)
    await eventually(lambda: _archived(look, 21))
    states = [row["state"] for row in await look.rows(archive=True)]
    assert (states.count("COMPLETED"), states.count("FAILED")) == (20, 1)


# -- undeclared operations -------------------------------------------------------------------------


@servers_only
async def test_a_broker_that_declares_nothing_needs_no_right(
    user: Account, its_broker: SqlBroker
) -> None:
    """A publish says what is missing then, and `ping` is false until it is there."""
    await its_broker.start()
    assert await its_broker.ping(60.0)
    with pytest.raises(AccessError, match="INSERT") as caught:
        await its_broker.publish("x", "q")
    said = str(caught.value)
    assert user.who in said
    assert not await its_broker.ping(5.0)
    grants = CURE.findall(said)
    assert grants
    user.execute(*grants)
    await eventually(lambda: its_broker.ping(5.0))
    assert await its_broker.publish("x", "q")
    assert user.try_as("DELETE FROM message")


CALLS: dict[str, Callable[[SqlBroker], Awaitable[Any]]] = {
    "pop": lambda broker: broker.pop("q"),
    "reserve": lambda broker: broker.reserve("q"),
    "lock": lambda broker: broker.lock("key").__aenter__(),
    "pause": lambda broker: broker.admin.pause("q"),
    "explain": lambda broker: broker.admin.explain(1),
    "policies": lambda broker: broker.admin.policies(),
}


@servers_only
@pytest.mark.parametrize("what", CALLS)
async def test_ping_asks_for_what_was_refused_and_for_nothing_else(
    user: Account, its_broker: SqlBroker, broker: SqlBroker, what: str
) -> None:
    call = CALLS[what]
    await broker.publish("x", "q")
    await its_broker.start()
    statements = ("claims", "writes what has ended") if what == "pop" else ("",)
    for _ in statements:
        with pytest.raises(AccessError, match="GRANT") as caught:
            await call(its_broker)
        assert not await its_broker.ping(5.0)
        user.execute(*CURE.findall(str(caught.value)))
    await call(its_broker)
    await eventually(lambda: its_broker.ping(5.0))
    assert user.try_as("INSERT INTO message (queue, payload) VALUES ('q', 'x')")


@servers_only
async def test_one_refusal_without_a_declaration_is_forgotten(
    user: Account, its_broker: SqlBroker, broker: SqlBroker
) -> None:
    """A role may have no need of it; who publishes, declared or not, has."""
    its_broker._clock.use(time := ShiftedTime())
    await broker.publish("x", "q")
    await its_broker.start()
    with pytest.raises(AccessError):
        await its_broker.pop("q")
    assert not await its_broker.ping(5.0)
    time.shift += rights.DENIAL_TTL
    await eventually(lambda: its_broker.ping(5.0))
    with pytest.raises(AccessError):
        await its_broker.pop("q")
    with pytest.raises(AccessError):
        await its_broker.publish("x", "q")
    time.shift += rights.DENIAL_TTL
    known = its_broker._rights
    await eventually(lambda: known._find_activities() == {Activity.PUBLISH})
    assert not await its_broker.ping(5.0)


# -- answers ---------------------------------------------------------------------------------------


@servers_only
async def test_answers_without_a_grant_delay_nothing(
    user: Account, its_broker: SqlBroker, broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """Producers ask for more of them than outcomes may be set apart; each is one failed attempt, at
    once."""
    handled: list[int] = []

    @its_broker.subscriber("q", retry_strategy=None, **QUICK)
    async def handle(number: int) -> int:
        handled.append(number)
        return number

    await start_with_what_it_asks_for(its_broker, user)
    asking = MAX_QUARANTINED + 100
    await broker.publish_batch(*range(asking), queue="q", reply_to="answers")
    await broker.publish_batch(*range(asking, asking + 20), queue="q")
    [subscriber] = its_broker.subscribers
    consumer = subscriber.consumer  # type: ignore[attr-defined]
    most_apart = 0
    while len(handled) < asking + 20:
        most_apart = max(most_apart, consumer.inflight.quarantined_count)
        assert not consumer.registration.is_held
        await asyncio.sleep(0.01)
    rows = await look.archived(asking + 20)
    assert most_apart == 0
    assert sorted(handled) == list(range(asking + 20)), "a handler was repeated"
    failed = [row for row in rows if row["state"] == "FAILED"]
    assert len(failed) == asking
    assert all("GRANT INSERT" in row["last_error"] for row in failed)
    assert all("no_reply=True" in row["last_error"] for row in failed)
    for _ in range(5):
        assert not await its_broker.ping(5.0)
    told = heard.texts("may not publish messages with the acks")
    assert 1 <= len(told) < 20
    user.execute(*CURE.findall(told[0]))
    await eventually(lambda: its_broker.ping(5.0))
    await broker.publish(-1, "q", reply_to="answers")
    await eventually(look.rows)


@servers_only
async def test_an_answer_that_may_not_be_written_in_a_transaction_names_the_grant(
    user: Account, its_broker: SqlBroker, broker: SqlBroker, look: Look
) -> None:
    @its_broker.subscriber("q", transactional=True, retry_strategy=None, **QUICK)
    async def handle(body: str) -> str:
        return body

    await start_with_what_it_asks_for(its_broker, user)
    await broker.publish("asks", "q", reply_to="answers")
    [row] = await look.archived(1)
    assert row["state"] == "FAILED"
    assert "GRANT INSERT" in row["last_error"]


@postgresql_only
async def test_one_answer_that_may_not_be_published_spares_the_others(
    user: Account, its_broker: SqlBroker, broker: SqlBroker, look: Look
) -> None:
    """The role may publish, but not with a dedup_id."""

    @its_broker.subscriber("q", retry_strategy=None, **QUICK)
    async def handle(body: str) -> SqlBrokerResponse:
        return SqlBrokerResponse(body, dedup_id="d" if body == "odd" else None)

    await start_with_what_it_asks_for(its_broker, user)
    user.execute(
        "GRANT INSERT (queue, payload, headers, priority, key, created_at, next_attempt_at, "
        "expires_at, id) ON message TO {who}",
        "GRANT USAGE ON SEQUENCE message_id_seq TO {who}",
    )
    await broker.publish_batch("a", "odd", "b", queue="q", reply_to="answers")
    await eventually(lambda: _archived(look, 3))
    states = {bytes(row["payload"]): row["state"] for row in await look.rows(archive=True)}
    assert states == {b"a": "COMPLETED", b"b": "COMPLETED", b"odd": "FAILED"}
    assert len(await look.rows()) == 2
    assert not await its_broker.ping(5.0)


REVOKED = "REVOKE INSERT (queue) ON message FROM {who}"


async def _archived(look: Look, count: int) -> bool:
    return len(await look.rows(archive=True)) == count


async def _execute(engine: AsyncEngine, statement: str) -> None:
    async with engine.begin() as connection:
        await connection.execute(text(statement))
