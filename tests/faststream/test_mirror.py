"""Messages with a lookup value, which are found until they leave the message table."""

import asyncio
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, func, insert, make_url, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from faststream_sqlbroker import (
    DESTINATION,
    PublishError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlProducer,
    StoreError,
    TestSqlBroker,
)
from faststream_sqlbroker.database.parts.mirror_rows import MIRROR
from faststream_sqlbroker.schema.types import clock
from tests.faststream.conftest import QUICK, Look
from tests.http.conftest import on_sqlite
from tests.plans.conftest import SYNC_DRIVERS

pytestmark = pytest.mark.capability("mirror: messages found by a lookup value until they leave")
RECORD = {
    "Name",
    "DestinationTopic",
    "EntryTime",
    "Info",
    "Lookup",
    "Payload",
    "Properties",
    "PublishAfter",
    "PublishCount",
    "PublishTime",
}


def of_sync(database_url: str) -> URL:
    """The address for synchronous code."""
    url = make_url(database_url)
    name = url.get_backend_name()
    return url.set(drivername=SYNC_DRIVERS.get(name, name))


async def stored_records(look: Look) -> int:
    """Also those of messages that have left."""
    table = look.tables.policy_state
    ours = select(func.count()).where(table.c.scope.startswith(MIRROR))
    async with look.engine.connect() as connection:
        found: int = (await connection.execute(ours)).scalar_one()
    return found


async def test_p11_a_message_is_mirrored_until_it_leaves(broker: SqlBroker, look: Look) -> None:
    """P11: through queues on its way, while it runs, and no longer."""
    admin = broker.admin
    while_running: list[Any] = []

    @broker.subscriber("mails", **QUICK)
    async def handle(body: Any) -> None:
        await admin.set_info("ann", "running")
        while_running.extend(await admin.mirrored(lookup="ann"))

    broker.subscriber("front", forward_to="mails", **QUICK)
    before = datetime.now(timezone.utc) - timedelta(minutes=5)
    message_id = await broker.publish(
        {"to": "ann"},
        "front",
        headers={"trace": "7"},
        delay="1h",
        lookup="ann",
        info="waiting",
    )
    await broker.publish("other", "later", delay="1h", lookup="Ann")
    [found] = await admin.mirrored(lookup="ann")
    record = found.record
    assert record.keys() == RECORD
    assert record["Name"] == str(message_id)
    assert record["DestinationTopic"] == "front"
    assert (record["Lookup"], record["Info"]) == ("ann", "waiting")
    assert json.loads(record["Payload"]) == {"to": "ann"}
    assert record["Properties"]["trace"] == "7"
    assert record["PublishCount"] == 1
    assert before < record["PublishTime"] <= record["EntryTime"]
    waits = record["PublishAfter"] - record["PublishTime"]
    assert abs(waits - timedelta(hours=1)) < timedelta(minutes=1)

    assert message_id is not None
    await admin.retry_now(message_id)
    await broker.start()
    async with asyncio.timeout(60):
        await look_gone(look, message_id)
    assert [(each.queue, each.info) for each in while_running] == [("mails", "running")]
    assert await admin.mirrored(lookup="ann") == []
    assert await admin.count_mirrored(lookup="ann") == 0
    assert await admin.set_info("ann", "too late") == 0
    [other] = await admin.mirrored()
    assert (other.lookup, other.info, other.destination) == ("Ann", None, "later")


async def test_p11_a_record_goes_when_its_message_is_published_to_its_destination(
    broker: SqlBroker, look: Look
) -> None:
    """P11: in the transaction that moves it there; what happens there later brings back none."""
    admin = broker.admin
    found: list[tuple[str, int]] = []

    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        queue = message.raw_message.queue
        found.append((queue, await admin.count_mirrored(lookup=message.headers["lookup"])))
        if queue == "mails":
            raise ValueError

    broker.subscriber("front", forward_to="sorted", **QUICK)
    broker.subscriber("sorted", forward_to=DESTINATION, **QUICK)
    broker.subscriber("mails", retry_strategy=None, dead_letter_queue="dead", **QUICK)(handle)
    broker.subscriber("dead", **QUICK)(handle)
    ids = [
        await broker.publish({}, "front", destination="mails", delay="1h", lookup=lookup)
        for lookup in ("ann", "eve")
    ]
    later = await broker.publish({}, "sorted", destination="mails", delay="1h", lookup="bob")
    [first] = await admin.mirrored(lookup="ann")
    assert first.record["DestinationTopic"] == "mails"
    for each in ids:
        assert each is not None
        await admin.retry_now(each)
    await broker.start()
    async with asyncio.timeout(60):
        for each in ids:
            assert each is not None
            await look_gone(look, each)
    assert sorted(found) == [("dead", 0)] * 2 + [("mails", 0)] * 2
    assert await admin.set_info("ann", "too late") == 0
    assert await stored_records(look) == 1
    [other] = await admin.mirrored()
    assert (other.id, other.queue) == (later, "sorted")


async def test_p11_a_message_that_waits_at_its_destination_keeps_its_record(
    broker: SqlBroker, look: Look
) -> None:
    """P11: it is moved there before its time, by its header."""
    broker.subscriber("front", forward_to=DESTINATION, **QUICK)
    await broker.publish(
        {}, "front", destination="mails", headers={"publish_after": "1h"}, lookup="ann"
    )
    await broker.start()
    async with asyncio.timeout(60):
        while [row["queue"] for row in await look.rows()] != ["mails"]:
            await asyncio.sleep(0.02)
    [found] = await broker.admin.mirrored(lookup="ann")
    assert found.queue == "mails"


async def look_gone(look: Look, message_id: int) -> None:
    """Wait until the message has left the message table."""
    while any(row["id"] == message_id for row in await look.rows()):
        await asyncio.sleep(0.02)


async def test_records_of_messages_that_have_left_are_removed(
    broker: SqlBroker, look: Look
) -> None:
    ids = await broker.publish_batch("a", "b", queue="q", lookup="x")
    await broker.publish("lives", "q", lookup="y")
    for each in ids:
        assert each is not None
        await broker.admin.cancel(each)
    assert await stored_records(look) == 3
    table = look.tables.policy_state
    ours = table.c.scope.startswith(MIRROR)
    for _ in range(2):  # the one that lives is kept, and asked about again
        async with look.engine.begin() as connection:
            await connection.execute(update(table).where(ours).values(expires_at=clock()))
        assert await broker.config.store.remove_expired_states(1_000) > 0
        assert await stored_records(look) == 1
    assert await broker.admin.count_mirrored(lookup="y") == 1


async def test_filters_are_exact_and_both_apply(broker: SqlBroker) -> None:
    for lookup, info in (
        ("a", "1"),
        ("a", "2"),
        ("b", "1"),
        ("A", "1"),
        ("a%", "é ü"),
        ("a:b", ""),
    ):
        await broker.publish("body", "q", lookup=lookup, info=info)
    await broker.publish("not mirrored", "q")
    count = broker.admin.count_mirrored
    assert await count() == 6
    assert await count(lookup="a") == 2
    assert await count(lookup="a", info="1") == 1
    assert await count(info="1") == 3
    assert await count(lookup="a%") == await count(info="é ü") == 1
    assert await count(info="É ü") == 0
    assert await count(info="") == 1
    assert await count(lookup="A", info="2") == 0
    first, second = await broker.admin.mirrored(lookup="a")
    assert [first.info, second.info] == ["1", "2"]
    assert await broker.admin.mirrored(lookup="a", limit=1) == [first]
    assert await broker.admin.set_info("a", "3", id=second.id) == 1
    assert await broker.admin.audit() == []
    assert await broker.admin.set_info("none", "3", by="Ann") == 0
    assert await count(lookup="a", info="1") == await count(lookup="a", info="3") == 1
    assert await broker.admin.set_info("a", None, by="Ann") == 2
    [action] = await broker.admin.audit()
    assert (action.action, action.by, action.done) == ("set_info", "Ann", 2)
    assert action.arguments == {"lookup": "a"}
    assert [each.info for each in await broker.admin.mirrored(lookup="a")] == [None, None]


async def test_each_way_to_publish_mirrors(
    broker: SqlBroker, engine: AsyncEngine, look: Look, database_url: str
) -> None:
    """In the caller's transaction, in a batch with options of its own, as an answer, with an ack,
    and from synchronous code."""

    @broker.subscriber("in", **QUICK)
    @broker.publisher("out")
    async def handle(body: str) -> SqlBrokerResponse:
        await broker.publish("ack", "out", lookup="ack", with_ack=True)
        return SqlBrokerResponse("answer", lookup="answer", info="i")

    async with AsyncSession(engine) as session:
        await broker.publish("no", "out", session=session, lookup="rolled back")
        await session.rollback()
        await broker.publish("yes", "out", session=session, lookup="session")
        await session.commit()
    async with engine.begin() as connection:
        await broker.publish("yes", "out", connection=connection, lookup="connection")
    one = SqlBrokerResponse("1", lookup="one")
    await broker.publish_batch(one, "2", queue="out", lookup="batch", info="of all")
    first = await broker.publish("1", "out", dedup_id="d", lookup="dedup")
    second = await broker.publish("2", "out", dedup_id="d", lookup="dedup")
    assert first is not None
    assert second is None
    sync = create_engine(of_sync(database_url))
    await asyncio.to_thread(SqlProducer(sync).publish, "sync", "out", lookup="sync")
    sync.dispose()
    await broker.publish("go", "in")
    await broker.start()
    async with asyncio.timeout(60):
        while [row for row in await look.rows() if row["queue"] == "in"]:
            await asyncio.sleep(0.02)
    found = {each.lookup: each.info for each in await broker.admin.mirrored()}
    assert found == {
        "session": None,
        "connection": None,
        "one": "of all",
        "batch": "of all",
        "dedup": None,
        "sync": None,
        "answer": "i",
        "ack": None,
    }
    assert await broker.admin.count_mirrored() == 8


async def test_a_refused_record_leaves_no_message_in_the_callers_transaction(
    broker: SqlBroker, engine: AsyncEngine, look: Look, database_url: str
) -> None:
    """The caller may catch the error and commit, but on PostgreSQL, which refuses that."""
    first = await broker.publish("first", "q")
    assert first is not None
    taken = [
        {"scope": MIRROR + "a", "key": str(number)} for number in range(first + 1, first + 100)
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(look.tables.policy_state), taken)
    async with engine.connect() as connection:
        await broker.publish("own", "q", connection=connection)
        with pytest.raises(StoreError):
            await broker.publish("refused", "q", lookup="a", connection=connection)
        if engine.dialect.name == "postgresql":
            await connection.rollback()
        else:
            many = ("one", "two"), {"queue": "q", "lookup": "a", "connection": connection}
            with pytest.raises(StoreError):
                await broker.publish_batch(*many[0], **many[1])
            await broker.publish("kept", "q", lookup="b", connection=connection)
            await connection.commit()
    sync = create_engine(of_sync(database_url))
    producer = SqlProducer(sync)
    with sync.connect() as plain:
        with pytest.raises(StoreError):
            await asyncio.to_thread(producer.publish, "no", "q", lookup="a", connection=plain)
        plain.rollback() if engine.dialect.name == "postgresql" else plain.commit()
    sync.dispose()
    kept = [] if engine.dialect.name == "postgresql" else ["own", "kept"]
    assert [row["payload"] for row in await look.rows()] == [
        each.encode() for each in ("first", *kept)
    ]


async def test_a_record_goes_with_the_callers_transaction_and_savepoint(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """It neither commits nor ends them; in autocommit mode there are none."""
    async with engine.connect() as connection:
        # Nothing was written before it.
        await broker.publish("dropped", "q", lookup="a", connection=connection)
        await connection.rollback()
        await broker.publish("kept", "q", lookup="b", connection=connection)
        inner = await connection.begin_nested()
        await broker.publish("dropped", "q", lookup="a", connection=connection)
        await inner.rollback()
        await connection.commit()
    alone = engine.execution_options(isolation_level="AUTOCOMMIT")
    async with alone.connect() as connection:
        await broker.publish("alone", "q", lookup="b", connection=connection)
    assert [row["payload"] for row in await look.rows()] == [b"kept", b"alone"]
    assert await broker.admin.count_mirrored() == await stored_records(look) == 2


@on_sqlite
async def test_what_cannot_be_mirrored_is_refused(broker: SqlBroker) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"info": "x"}, "info='x' needs lookup="),
        ({"lookup": ""}, "lookup cannot be ''"),
        ({"lookup": "x" * 256}, "lookup cannot be"),
        ({"lookup": 7}, "lookup cannot be 7"),
        ({"lookup": "a", "info": "x" * 1_001}, "at most 1000 characters"),
        ({"lookup": "a", "info": "\0"}, "without NUL characters"),
        ({"lookup": "a", "info": "\ud800"}, "without NUL characters"),
        ({"lookup": "a", "info": 7}, "info must be text"),
    ]
    for options, told in wrong:
        with pytest.raises(PublishError, match=told):
            await broker.publish("body", "q", **options)
    with pytest.raises(PublishError, match="request does not take lookup="):
        await broker.request("body", "q", lookup="a")  # type: ignore[call-arg]
    for look_up in (broker.admin.count_mirrored, broker.admin.mirrored):
        with pytest.raises(ValueError, match="cannot be a lookup value"):
            await look_up(lookup="")  # type: ignore[operator]
        with pytest.raises(ValueError, match="info must be text"):
            await look_up(info="\0")  # type: ignore[operator]
    with pytest.raises(ValueError, match="needs a lookup value"):
        await broker.admin.set_info(None, "x")  # type: ignore[arg-type]
    assert await broker.admin.count_mirrored() == 0


@on_sqlite
async def test_a_test_broker_mirrors(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine)

    @broker.subscriber("q")
    async def handle(body: str) -> int:
        return await broker.admin.count_mirrored(lookup="a")

    async with TestSqlBroker(broker):
        await broker.publish("x", "q", lookup="a")
        assert await broker.admin.count_mirrored(lookup="a") == 0
        await broker.publish("x", "other", lookup="b", delay="1h")
        assert await broker.admin.count_mirrored(lookup="b") == 1


@on_sqlite
async def test_a_test_broker_mirrors_what_a_transaction_of_the_test_publishes(
    engine: AsyncEngine,
) -> None:
    """It holds that back until the COMMIT, and gives it the id that its publisher was told."""
    async with TestSqlBroker(SqlBroker(engine)) as broker:
        with create_engine("sqlite://").connect() as plain:
            broker.publish_sync("dropped", "q", lookup="a", connection=plain)
            plain.rollback()
            first = broker.publish_sync("kept", "q", lookup="a", connection=plain)
            plain.commit()
        another = create_async_engine("sqlite+aiosqlite://")
        async with another.connect() as connection:
            second = await broker.publish("kept", "q", lookup="a", connection=connection)
            await connection.commit()
            await broker.drain()
        await another.dispose()
        found = await broker.admin.mirrored(lookup="a")
        assert [each.id for each in found] == [first, second]
        assert await broker.admin.set_info("a", "i", id=first) == 1
