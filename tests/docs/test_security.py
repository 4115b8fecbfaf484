"""docs/howto/security.md: with each GRANT a user may do what the page says, and nothing else."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    AccessError,
    LockLostError,
    MaxDepth,
    QueueFullError,
    RightsError,
    SqlBroker,
    SqlBrokerResponse,
    StoreError,
)
from faststream_sqlbroker.admin import Repair
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.horizon import find_horizon
from tests.accounts import Account, account
from tests.faststream.conftest import QUICK, Heard, _patience, _time_to_end
from tests.faststream.test_rights import consumes, publish_all
from tests.helpers import eventually

__all__ = ("_patience", "_time_to_end")
PAGE = (Path(__file__).parent.parent.parent / "docs" / "howto" / "security.md").read_text()
BLOCK = re.compile(r"```sql\n-- (\w+), ([^\n]+)\n(.*?)```", re.DOTALL)
NAMES = {"postgresql": "PostgreSQL", "mariadb": "MySQL and MariaDB", "mysql": "MySQL and MariaDB"}
servers_only = pytest.mark.parametrize("database", list(NAMES), indirect=True)
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)

Steps = dict[str, list[str]]


def grants(role: str, database: str) -> Steps:
    """The page's statements for `role`, by their step; without steps under an empty name."""
    [body] = [
        body
        for name, where, body in BLOCK.findall(PAGE)
        if (name, where) == (role, NAMES[database])
    ]
    parts = re.split(r"^-- step: (.*)\n", body, flags=re.MULTILINE)
    named = {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    found = {name: [s.strip() for s in sql.split(";") if s.strip()] for name, sql in named.items()}
    return {name: statements for name, statements in found.items() if statements}


def given(user: Account, *statements: str) -> None:
    """Run the page's `statements` for `user`."""
    user.execute(*(re.sub(r" TO (?:shop_\w+|'shop_\w+'@'%')", " TO {who}", s) for s in statements))


@pytest.fixture
async def owner(engine: AsyncEngine) -> AsyncIterator[SqlBroker]:
    """The owner's broker, with the tables."""
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    yield broker
    await broker.stop()


@pytest.fixture
def user(database_url: str, owner: SqlBroker) -> Iterator[Account]:
    with account(database_url) as user:
        yield user


@pytest.fixture
async def broker(user: Account) -> AsyncIterator[SqlBroker]:
    """The user's."""
    engine = user.engine()
    broker = SqlBroker(engine, logger=None, graceful_timeout=5.0)
    yield broker
    await broker.stop()
    await engine.dispose()


def test_every_block_is_run_by_a_test() -> None:
    assert (
        len(BLOCK.findall(PAGE)) == PAGE.count("```sql") == PAGE.count("\n-- step: everything") + 9
    )
    for database in NAMES:
        for role in ("producer", "counter", "consumer", "reader", "operator"):
            assert grants(role, database)


# -- producers -------------------------------------------------------------------------------------


@servers_only
async def test_a_producer(user: Account, broker: SqlBroker) -> None:
    given(
        user,
        *(statement for step in grants("producer", _kind(user)).values() for statement in step),
    )
    await broker.start()
    await publish_all(broker, broker.engine)
    assert await broker.ping(60.0), "it needs no right for a probe"
    refused = user.try_as(
        "SELECT payload FROM message",
        "SELECT headers FROM message",
        "UPDATE message SET payload = 'x'",
        "DELETE FROM message",
        "INSERT INTO message (queue, payload, state) VALUES ('q', 'x', 'PROCESSING')",
        "INSERT INTO message (queue, payload, attempts_count) VALUES ('q', 'x', 9)",
        "SELECT id FROM message_archive",
        "DELETE FROM message_archive",
        "SELECT scope FROM message_policy_state",
    )
    assert len(refused) == 9


@servers_only
async def test_a_producer_with_lookup_values(user: Account, owner: SqlBroker) -> None:
    words = " ".join(PAGE.split())
    assert "`lookup=` needs INSERT (scope, key, info, expires_at, counter) on that" in words
    engine = user.engine()
    broker = SqlBroker(engine, logger=None)
    kind = _kind(user)
    key = "key" if kind == "postgresql" else "`key`"
    table = f"message_policy_state TO {user.who}"
    try:
        given(user, *(sql for step in grants("producer", kind).values() for sql in step))
        with pytest.raises(AccessError, match="to publish with a lookup value"):
            await broker.publish("x", "q", lookup="a")
        user.execute(f"GRANT INSERT (scope, {key}, info, expires_at, counter) ON {table}")
        assert await broker.publish("x", "q", lookup="a")
        assert await owner.admin.count_mirrored(lookup="a") == 1
    finally:
        await broker.stop()
        await engine.dispose()


@servers_only
async def test_a_producer_that_counts(user: Account) -> None:
    engine = user.engine()
    broker = SqlBroker(engine, logger=None, max_depth={"q": MaxDepth(1, "raise")})
    broker.publisher("q")
    try:
        given(
            user,
            *(statement for step in grants("producer", _kind(user)).values() for statement in step),
        )
        with pytest.raises(RightsError, match="to enforce max_depth"):
            await broker.start()
        given(user, *grants("counter", _kind(user))[""])
        await broker.start()
        assert await broker.publish("x", "q")
        async with broker.engine.begin() as connection:
            with pytest.raises(QueueFullError):
                await broker.publish("x", "q", connection=connection)
        assert user.try_as("SELECT payload FROM message")
    finally:
        await broker.stop()
        await engine.dispose()


@postgresql_only
async def test_what_each_way_to_publish_needs(user: Account, broker: SqlBroker) -> None:
    alike, different, dedup = grants("producer", "postgresql").values()
    await broker.connect()

    async def one() -> None:
        assert await broker.publish(
            "x", "q", headers={"a": 1}, key="k", priority=1, delay=1, expires_in=60
        )

    async def several() -> None:
        ids = await asyncio.gather(
            *(broker.publish(str(n), "q", headers={"n": n}) for n in range(9))
        )
        assert len(set(ids)) == 9
        assert len(await broker.publish_batch("a", "b", queue="q")) == 2

    async def joined() -> None:
        async with broker.engine.begin() as connection:
            assert await broker.publish("x", "q", connection=connection)
            assert len(await broker.publish_batch("a", "b", queue="q", connection=connection)) == 2

    async def mixed() -> None:
        await broker.publish_batch(
            SqlBrokerResponse("a", priority=1), SqlBrokerResponse("b"), queue="q"
        )

    async def deduplicated() -> None:
        await broker.publish("x", "q", dedup_id="d")

    ways: list[Callable[[], Awaitable[None]]] = [one, several, joined, mixed, deduplicated]
    for statements, works in (((), 0), (alike, 3), (different, 4), (dedup, 5)):
        given(user, *statements)
        for way in ways[:works]:
            await way()
        for way in ways[works:]:
            with pytest.raises(AccessError):
                await way()


@servers_only
async def test_a_producer_with_schedules(user: Account, broker: SqlBroker) -> None:
    """The producer's rights, and three of a consumer's."""
    given(
        user,
        *(statement for step in grants("producer", _kind(user)).values() for statement in step),
    )
    user.execute("GRANT SELECT, INSERT, UPDATE ON message_policy_state TO {who}")
    broker.publish_on_schedule("tick", "* * * * * *", "ticks", "tick")
    await broker.start()
    await eventually(lambda: _count(user, "message"))


# -- consumers -------------------------------------------------------------------------------------


@servers_only
async def test_a_consumer(user: Account, owner: SqlBroker, broker: SqlBroker) -> None:
    given(user, *grants("consumer", _kind(user))[""])
    consumes(broker)
    await broker.start()
    queues = [queue for subscriber in broker.subscribers for queue in subscriber.queues]  # type: ignore[attr-defined]
    for queue in queues:
        await owner.publish("x", queue, key="k")
    await eventually(lambda: _count(user, "message_archive") == len(queues))
    await owner.publish("x", "alone")
    assert await broker.pop("alone") is not None
    await owner.publish("x", "alone")
    reservation = await broker.reserve("alone")
    assert reservation is not None
    await reservation.commit()
    async with broker.lock("key"):
        pass
    refused = user.try_as(
        "INSERT INTO message (queue, payload) VALUES ('q', 'x')",
        "SELECT payload FROM message_archive",
        "DELETE FROM message_archive",
        "UPDATE message_archive SET queue = 'x'",
    )
    assert len(refused) == 4


@servers_only
async def test_a_consumer_that_answers_is_a_producer_too(
    user: Account, owner: SqlBroker, broker: SqlBroker
) -> None:
    given(user, *grants("consumer", _kind(user))[""])
    given(
        user,
        *(statement for step in grants("producer", _kind(user)).values() for statement in step),
    )

    @broker.subscriber("q", transactional=True, **QUICK)
    @broker.publisher("answers")
    async def handle(body: str) -> str:
        await broker.publish(body, "more", with_ack=True)
        return body

    await broker.start()
    await owner.publish("x", "q", reply_to="replies")
    await eventually(lambda: _count(user, "message") == 3)


@servers_only
async def test_a_lock_needs_three_rights(user: Account, broker: SqlBroker) -> None:
    user.execute("GRANT SELECT, INSERT, UPDATE ON message_policy_state TO {who}")
    await broker.start()
    for _ in range(2):
        async with broker.lock("key"):
            pass
    assert await broker.ping(60.0)


# -- readers and operators -------------------------------------------------------------------------


@servers_only
async def test_a_reader(user: Account, database_url: str) -> None:
    """Spark's own part is in tests/spark."""
    given(user, *grants("reader", _kind(user))[""])
    address = make_url(database_url).set(username=user.name, password=user.engine().url.password)
    database = get_database(parse_address(address))
    with database.connect() as connection:
        horizon = find_horizon(database, connection, safety_lag="90s", margin=0)
    if _kind(user) != "mysql":  # a shared server's other databases may be busy, or be a replica
        assert horizon.source in {"transactions", "safety lag"}
    assert "GRANT" not in (horizon.detail or "")
    refused = user.try_as(
        "SELECT payload FROM message",
        "DELETE FROM message_archive",
        "SELECT scope FROM message_policy_state",
        "INSERT INTO message (queue, payload) VALUES ('q', 'x')",
    )
    assert len(refused) == 4
    assert user.try_as("SELECT * FROM message_archive") == []


@servers_only
async def test_an_operator(user: Account, owner: SqlBroker, broker: SqlBroker) -> None:
    given(user, *grants("operator", _kind(user))[""])
    await broker.start()
    admin = broker.admin
    waiting = await owner.publish("x", "q", key="k")
    await owner.publish("y", "q", key="k")
    assert (await admin.explain(waiting or 0)).state is not None
    [overview] = await admin.queues()
    assert (overview.queue, overview.ready.value) == ("q", 2)
    await admin.pause("q", reason="maintenance")
    [paused] = await admin.paused()
    assert paused.queue == "q"
    assert "paused" in {reason.code for reason in (await admin.explain(waiting or 0)).reasons}
    assert await admin.resume("q")
    handled = asyncio.Event()

    @owner.subscriber("q", ordered=True, **QUICK)
    async def handle(body: str) -> None:
        handled.set()

    await owner.start()
    await asyncio.wait_for(handled.wait(), 60)
    await eventually(lambda: _count(user, "message_archive") == 2)
    assert [r.code for r in (await admin.explain(waiting or 0)).reasons] == ["archived"]
    assert await admin.subscribers("q")
    with pytest.raises(LockLostError):
        async with owner.lock("key"):
            assert [lock.key for lock in await admin.locks()] == ["key"]
            assert await admin.release_lock("key")
    assert await admin.unknown() == []
    assert await admin.forget_unknown(1) == 0
    assert await admin.schedules() == []
    assert await admin.pause_schedule("none") is False
    assert await admin.forget_schedule("none") is False
    assert await broker.ping(60.0)
    refused = user.try_as(
        "SELECT payload FROM message",
        "SELECT headers FROM message",
        "SELECT payload FROM message_archive",
        "UPDATE message SET state = 'PENDING'",
        "DELETE FROM message",
        "DELETE FROM message_archive",
        "INSERT INTO message (queue, payload) VALUES ('q', 'x')",
    )
    assert len(refused) == 7


@servers_only
async def test_an_operator_who_may_see_bodies(
    user: Account, owner: SqlBroker, broker: SqlBroker
) -> None:
    given(user, *grants("operator", _kind(user))[""])
    admin = broker.admin
    message_id = await owner.publish("secret", "q") or 0
    assert [m.id for m in (await admin.messages(queue="q", key=None)).messages] == [message_id]
    assert (await admin.messages(archived=True)).messages == ()
    assert await admin.message(message_id, body=False) is not None
    for refused in (
        admin.messages(bodies=True),
        admin.messages(headers={"a": "b"}),
        admin.message(message_id),
    ):
        with pytest.raises(AccessError, match="to show headers and bodies"):
            await refused
    given(user, *grants("operator", _kind(user))["bodies"])
    [shown] = (await admin.messages(bodies=True)).messages
    assert shown.body == "secret"
    assert (await admin.messages(headers={"a": "b"}, archived=True)).messages == ()
    assert await admin.message(message_id) is not None


@servers_only
async def test_an_operator_who_may_repair(
    user: Account, owner: SqlBroker, broker: SqlBroker
) -> None:
    given(user, *grants("operator", _kind(user))[""])
    admin = broker.admin
    message_id = await owner.publish("x", "q", delay=60) or 0
    actions: list[Callable[[], Awaitable[Repair]]] = [
        lambda: admin.retry_now(message_id),
        lambda: admin.postpone(message_id, "1h"),
        lambda: admin.edit(message_id, priority=3, key="k"),
        lambda: admin.move(message_id, "other"),
        lambda: admin.cancel(message_id),
    ]
    for action in actions:
        with pytest.raises(AccessError, match="to cancel, move and change messages"):
            await action()
    given(user, *grants("operator", _kind(user))["repair"])
    assert [(await action()).verdict for action in actions] == ["done"] * 5
    refused = user.try_as(
        "UPDATE message SET payload = 'x'",
        "UPDATE message SET lease_token = NULL",
        "INSERT INTO message (queue, payload) VALUES ('q', 'x')",
        "DELETE FROM message_archive",
    )
    assert len(refused) == 4


@servers_only
async def test_an_operator_who_may_redrive(
    user: Account, owner: SqlBroker, broker: SqlBroker
) -> None:
    @owner.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        raise ValueError(body)

    await owner.publish_batch("x", "y", queue="q")
    await owner.start()
    await eventually(lambda: _count(user, "message_archive") == 2)
    await owner.stop()
    given(user, *grants("operator", _kind(user))[""], *grants("operator", _kind(user))["repair"])
    admin = broker.admin
    with pytest.raises(RightsError, match="to redrive and replay archived messages"):
        await admin.redrive(dry_run=False)
    with pytest.raises(RightsError, match="to redrive and replay archived messages"):
        await admin.replay("n", dry_run=False)
    assert await admin.audit(bulk=True) == []  # nothing is stored of what was refused
    given(user, *grants("operator", _kind(user))["redrive"])
    job = await admin.redrive(dry_run=False)
    assert job.done == 2
    assert await admin.undo((await admin.bulk_retry(dry_run=False)).id)


@servers_only
async def test_an_operator_who_may_release(
    user: Account, owner: SqlBroker, broker: SqlBroker
) -> None:
    given(user, *grants("operator", _kind(user))[""])
    end = asyncio.Event()

    @owner.subscriber("q", **QUICK)
    async def handle(body: str) -> None:
        await end.wait()

    await owner.publish("x", "q")
    await owner.start()
    await eventually(lambda: _count(user, "message WHERE state = 'PROCESSING'") == 1)
    [live] = await broker.admin.subscribers("q")
    await owner.admin.pause("q")
    with pytest.raises(AccessError, match="to release a worker's messages"):
        await broker.admin.release(live.worker, force=True)
    given(user, *grants("operator", _kind(user))["release"])
    assert await broker.admin.release(live.worker, force=True) == 1
    end.set()
    refused = user.try_as(
        "UPDATE message SET payload = 'x'", "UPDATE message SET queue = 'x'", "DELETE FROM message"
    )
    assert len(refused) == 3


# -- logs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "driver"),
    [*((kind, None) for kind in ("sqlite", *NAMES)), ("postgresql", "postgresql+psycopg")],
    indirect=["database"],
)
async def test_no_body_and_no_header_is_logged(
    database: str, database_url: str, driver: str | None
) -> None:
    """Not when the database refuses a row either, which PostgreSQL quotes then."""
    url = make_url(database_url)
    url = url if driver is None else url.set(drivername=driver)
    engine = create_async_engine(url)
    heard = Heard()
    logger = logging.Logger("test", logging.DEBUG)  # noqa: LOG001 - one for this test
    logger.addHandler(heard)
    broker = SqlBroker(engine, logger=logger, log_level=logging.DEBUG)
    await broker.create_tables()

    @broker.subscriber("q", retry_strategy=None, **QUICK)
    async def handle(body: str) -> None:
        if body.endswith("fails"):
            raise ValueError("of the handler's")

    await broker.start()
    for end in ("works", "fails"):
        await broker.publish(f"hidden body {end}", "q", headers={"a": "hidden header"})
    await eventually(lambda: heard.texts("Processed") and heard.texts("of the handler's"))
    if database != "sqlite":  # it cannot add one
        async with engine.begin() as connection:
            await connection.execute(
                text("ALTER TABLE message ADD CONSTRAINT ours CHECK (queue <> 'no')")
            )
            await connection.execute(
                text("ALTER TABLE message_archive ADD CONSTRAINT too CHECK (priority <> 7)")
            )
        with pytest.raises(StoreError) as caught:
            await broker.publish("hidden body", "no", headers={"a": "hidden header"})
        await broker.publish("hidden body", "q", headers={"a": "hidden header"}, priority=7)
        await eventually(lambda: heard.texts("were refused by the database"))
        heard.handle(logging.makeLogRecord({"msg": str(caught.value)}))
        # A stop would try for ten seconds to write what is refused.
        async with engine.begin() as connection:
            await connection.execute(text("ALTER TABLE message_archive DROP CONSTRAINT too"))
    await broker.stop()
    await engine.dispose()
    formatter = logging.Formatter()
    said = "\n".join(formatter.format(record) for record in heard.records)
    assert "hidden" not in said
    assert b"hidden".hex() not in said


@servers_only
async def test_no_password_is_logged(user: Account) -> None:
    engine = create_async_engine(user.url.set(username=user.name, password="hunter2 it was"))
    heard = Heard()
    logger = logging.Logger("test", logging.DEBUG)  # noqa: LOG001 - one for this test
    logger.addHandler(heard)
    broker = SqlBroker(engine, logger=logger)
    said = []
    if user.postgresql:  # a server that trusts everybody here asks for no password
        engine = create_async_engine(
            user.url.set(username="no_such_user", password="hunter2 it was")
        )
        broker = SqlBroker(engine, logger=logger)
    with pytest.raises(StoreError) as caught:
        await broker.start()
    error: BaseException | None = caught.value
    while error is not None:
        said.append(str(error))
        error = error.__cause__
    await broker.stop()
    await engine.dispose()
    assert "hunter2" not in "\n".join([*said, *heard.texts("")])


def _kind(user: Account) -> str:
    return user.url.get_backend_name()


def _count(user: Account, table: str) -> int:
    with user.owner.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())
