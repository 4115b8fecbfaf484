"""Warnings at the start: other policies in the queue, a small pool, messages that would be
deleted."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import Concurrency, SqlBroker, SqlBrokerSchemaConfig, Throttle
from faststream_sqlbroker.annotations import SqlConnection
from tests.faststream.conftest import CALM, QUICK, Heard
from tests.helpers import eventually

DIFFER = "subscribers of queue"


@pytest.fixture
async def other(
    engine: AsyncEngine, database_url: str, broker: SqlBroker
) -> AsyncIterator[tuple[SqlBroker, Heard]]:
    """A second process, as far as the database can tell, and what it says."""
    heard = Heard()
    logger = logging.Logger("other")  # noqa: LOG001 - one for each test
    logger.addHandler(heard)
    engine = create_async_engine(database_url)
    second = SqlBroker(engine, logger=logger, graceful_timeout=60.0)
    yield second, heard
    await second.stop()
    await engine.dispose()


def subscribe(broker: SqlBroker, queue: str = "q", **options: Any) -> None:
    @broker.subscriber(queue, **{**QUICK, **options})
    async def handle(body: Any) -> None: ...


async def compared(broker: SqlBroker) -> None:
    """Wait until the members of `broker` have looked at the others."""
    presence = broker._heartbeat
    await eventually(
        lambda: (
            presence._registrations and presence._registrations.keys() <= presence._compared_names
        )
    )


@pytest.mark.parametrize("plain_first", [True, False])
@pytest.mark.parametrize(
    "options", [{"ordered": True}, {"policies": [Throttle(5, per="1s")]}], ids=["ordered", "policy"]
)
async def test_a_subscriber_without_the_policies_of_its_queue_is_warned_of_and_explained(
    broker: SqlBroker,
    heard: Heard,
    other: tuple[SqlBroker, Heard],
    options: dict[str, Any],
    plain_first: bool,
) -> None:
    second, heard_second = other
    subscribe(broker, **({} if plain_first else options))
    subscribe(second, **(options if plain_first else {}))
    await broker.start()
    await compared(broker)
    assert not heard.texts(DIFFER)
    await broker.admin.pause("q")
    message_id = await broker.publish("x", "q")
    assert [r.code for r in (await broker.admin.explain(message_id)).reasons] == ["paused"]
    await second.start()
    await compared(second)
    [line] = heard_second.texts(DIFFER, logging.WARNING)
    way = "ordered=True" if "ordered" in options else str(options["policies"][0])
    assert line.startswith("subscribers of queue 'q' differ: ")
    assert "(plain)" in line
    assert f"({way})" in line
    assert not heard.texts(DIFFER), "who was there first has nothing to do"
    reasons = {r.code: r.text for r in (await broker.admin.explain(message_id)).reasons}
    assert list(reasons) == ["paused", "mixed_subscribers"]
    assert "(plain)" in reasons["mixed_subscribers"]
    assert f"({way})" in reasons["mixed_subscribers"]


async def test_a_rolling_change_is_warned_of_once_for_each_pair_with_both_texts(
    broker: SqlBroker, other: tuple[SqlBroker, Heard]
) -> None:
    second, heard = other
    old = Throttle(5, per="1s")
    new = Throttle(7, per="1s")
    subscribe(broker, policies=[old])
    subscribe(broker, policies=[old])  # an old process more
    subscribe(broker, "alike", policies=[old])
    await broker.start()
    await compared(broker)
    subscribe(second, policies=[new])
    subscribe(second, policies=[new])
    subscribe(second, "alike", policies=[old])
    for _ in range(2):
        await second.start()
        await compared(second)
        await second.stop()
    [line] = heard.texts(DIFFER)
    assert f"({old})" in line
    assert f"({new})" in line
    assert "and 1 more" in line
    await broker.stop()
    await second.start()
    await compared(second)
    assert len(heard.texts(DIFFER)) == 1


POOL = "transactional=True needs a connection for each running handler"


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
@pytest.mark.parametrize("workers", [4, 3])
async def test_a_pool_too_small_for_transactional_workers_is_warned_of_with_numbers(
    database_url: str, database: str, logger: logging.Logger, heard: Heard, workers: int
) -> None:
    """Of 8 connections 2 are for the loops, one is for publishing, and PostgreSQL has one that
    listens."""
    places = 4 if database == "postgresql" else 5
    engine = create_async_engine(database_url, pool_size=5, max_overflow=3)
    broker = SqlBroker(engine, logger=logger, graceful_timeout=60.0)
    await broker.create_tables()
    two = places - workers + 1

    @broker.subscriber("a", **QUICK, transactional=True, max_workers=workers)
    async def first(body: Any, connection: SqlConnection) -> None: ...

    @broker.subscriber("b", **QUICK, transactional=True, max_workers=two)
    async def second(body: Any, connection: SqlConnection) -> None: ...

    subscribe(broker, "c", max_workers=50)
    await broker.start()
    [line] = heard.texts(POOL, logging.WARNING)
    assert f"max_workers allows {places + 1} handlers at a time" in line
    assert "has at most 8 connections and the broker leaves them " + f"{places}, so" in line
    assert "Raise max_overflow by 1" in line
    await broker.stop()
    await engine.dispose()

    heard.records.clear()
    enough = create_async_engine(database_url, pool_size=5, max_overflow=4)
    again = SqlBroker(enough, logger=logger, graceful_timeout=60.0)

    @again.subscriber("a", **QUICK, transactional=True, max_workers=places + 1)
    async def third(body: Any, connection: SqlConnection) -> None: ...

    await again.start()
    assert not heard.texts(POOL)
    await again.stop()
    await enough.dispose()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_sqlite_has_one_writer_whatever_the_pool_gives(
    broker: SqlBroker, heard: Heard
) -> None:
    @broker.subscriber("q", **QUICK, transactional=True, max_workers=20)
    async def handle(body: Any, connection: SqlConnection) -> None: ...

    await broker.start()
    assert not heard.texts(POOL)


DELETED = "messages that fail for good are deleted"


async def test_without_an_archive_each_subscriber_that_can_fail_is_warned_of(
    engine: AsyncEngine, logger: logging.Logger, heard: Heard
) -> None:
    schema = SqlBrokerSchemaConfig(message_archive_table_name=None)
    broker = SqlBroker(engine, schema=schema, logger=logger, graceful_timeout=60.0)
    await broker.create_tables()
    subscribe(broker, "plain")
    # It may still reject, or be rejected unread.
    subscribe(broker, "acked", ack_policy=AckPolicy.ACK)
    subscribe(broker, "dead", dead_letter_queue="dead.letters")
    subscribe(broker, "unwanted", retain_in_archive_on_reject=False)
    subscribe(broker, "first", ack_policy=AckPolicy.ACK_FIRST)
    broker.subscriber("moved", **QUICK, forward_to="plain")
    broker.subscriber("without a handler", **QUICK)
    await broker.start()
    found = [r for r in heard.records if DELETED in r.getMessage()]
    told = sorted((r.levelno, getattr(r, "queue", "")) for r in found)
    assert told == [(logging.WARNING, queue) for queue in ("acked", "moved", "plain")]
    assert all("dead_letter_queue" in r.getMessage() for r in found)
    await broker.stop()


async def test_with_an_archive_nothing_is_deleted(broker: SqlBroker, heard: Heard) -> None:
    subscribe(broker, "plain")
    await broker.start()
    assert not heard.texts(DELETED)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_limit_that_each_of_several_queues_has_is_warned_of(
    broker: SqlBroker, heard: Heard
) -> None:
    """Decided without the database."""
    warned = [Throttle(5, per="1s"), Concurrency(5)]
    fine = [
        Throttle(5, per="1s", scope="mail"),
        Throttle(5, per="1s", key=True),
        Concurrency(5, per_key=True),
    ]

    def subscribe(queues: list[str], policy: Any) -> None:
        @broker.subscriber(queues, policies=[policy], **CALM)
        async def handle(body: Any) -> None: ...

    for n, policy in enumerate([*warned, *fine]):
        subscribe([f"q{n}", f"r{n}"], policy)
    subscribe(["alone"], Throttle(5, per="1s"))
    await broker.start()
    lines = heard.texts("limits each queue separately", logging.WARNING)
    assert sorted(lines) == sorted(
        f"{policy} of the subscriber of q{n}, r{n} limits each queue separately: give it a scope "
        "for one limit over all of them, or declare a subscriber for each queue"
        for n, policy in enumerate(warned)
    )
