"""forward_to: subscribers without a handler that move messages on as they are."""

import logging
import re
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    DESTINATION,
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerPublisher,
    SqlBrokerRoute,
    SqlBrokerRouter,
)
from faststream_sqlbroker.core.rows import NewMessage
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`forward_to`: queue to queue without a handler")
OPAQUE = b"\xff\xfe\x00\x80 no text"
URL = "sqlite+aiosqlite:///x.db"


async def all_in(look: Look, queue: str, count: int) -> list[dict[str, Any]]:
    """Wait until `count` messages wait in `queue`, and nothing else is live."""

    async def there() -> list[dict[str, Any]] | None:
        rows = await look.rows()
        fine = all(row["queue"] == queue and row["state"] == "PENDING" for row in rows)
        return rows if fine and len(rows) == count else None

    rows = await eventually(there)
    assert rows is not None
    return rows


async def test_a_message_is_moved_as_it_is(broker: SqlBroker, look: Look) -> None:
    """Z11: the body is opaque; same id, counters begin anew, publish_count stays."""
    broker.subscriber("in", **QUICK, forward_to="out")
    store = broker.config.store
    headers = '{"content-type": "text/nonsense", "a": [1, null]}'
    [message_id] = await store.insert([NewMessage("in", OPAQUE, headers, 7, "key", "once")])
    before = await look.in_state("PENDING")
    async with broker.engine.begin() as connection:
        await connection.execute(text("UPDATE message SET publish_count = 3, attempts_count = 2"))
    await broker.start()
    [row] = await all_in(look, "out", 1)
    assert (row["id"], bytes(row["payload"]), row["headers"]) == (
        message_id,
        OPAQUE,
        before["headers"],
    )
    assert (row["priority"], row["key"], row["publish_count"]) == (7, "key", 3)
    assert (row["attempts_count"], row["deliveries_count"], row["dedup_id"]) == (0, 0, None)
    assert row["created_at"] == before["created_at"]
    assert await look.rows(archive=True) == []


async def test_invalid_headers_do_not_stop_a_move(broker: SqlBroker, look: Look) -> None:
    broker.subscriber("in", **QUICK, forward_to="out")
    invalid = ("[]", '"text"', "17", "null")
    await broker.config.store.insert([NewMessage("in", OPAQUE, headers) for headers in invalid])
    await broker.start()
    await all_in(look, "out", len(invalid))


async def test_several_steps_to_a_handler(broker: SqlBroker, look: Look) -> None:
    """Z12 and M6: what is published arrives once, with its own id."""
    got: list[tuple[str, int]] = []
    for queue, target in (("a", "b"), ("b", "c"), ("c", "d")):
        options = {**QUICK, "fetch_batch_size": 20, "max_workers": 2}
        broker.subscriber(queue, **options, forward_to=target)

    @broker.subscriber("d", **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        got.append((body, message.raw_message.id))

    await broker.start()
    ids = await broker.publish_batch(*(f"n{n}" for n in range(60)), queue="a")
    rows = await look.archived(60)
    assert sorted(got) == sorted((f"n{n}", i) for n, i in enumerate(ids) if i is not None)
    assert {(r["queue"], r["state"], r["deliveries_count"], r["publish_count"]) for r in rows} == {
        ("d", "COMPLETED", 1, 1)
    }


async def idle(*subscribers: Any, wait: float) -> None:
    """Wait until each has begun a wait of at least twenty seconds; `wait` is the longest that it
    makes."""
    fetchers = [subscriber.consumer._fetcher for subscriber in subscribers]
    await eventually(lambda: all(fetcher.pace.idle_wait > 0.1 for fetcher in fetchers))
    for fetcher in fetchers:
        fetcher.pace.idle_wait = wait * 0.7  # it grows by a half when the wait begins
    await eventually(lambda: all(fetcher.pace.idle_wait == wait for fetcher in fetchers))


async def test_the_next_queue_is_woken(broker: SqlBroker, look: Look) -> None:
    """Without a hint the second step would look after ten minutes."""
    slow: Any = {"max_fetch_interval": 600.0, "flush_interval": 0.01}
    broker.subscriber("a", **slow, forward_to="b")

    @broker.subscriber("b", **slow)
    async def handle(body: str) -> None: ...

    await broker.start()
    await idle(*broker.subscribers, wait=600.0)
    await broker.publish("x", "a")
    await look.archived()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_the_next_queue_is_woken_in_another_process(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    other = SqlBroker(engine, logger=None)
    broker.subscriber("a", **QUICK, forward_to="b")

    @other.subscriber("b", max_fetch_interval=600.0)
    async def handle(body: str) -> None: ...

    await other.start()
    await broker.start()
    await eventually(lambda: other.config.wakeups.is_listening)
    await idle(*other.subscribers, wait=600.0)
    await broker.publish("x", "a")
    await look.archived()
    await other.stop()


async def test_the_order_of_keys_is_kept(broker: SqlBroker, look: Look) -> None:
    seen: dict[str, list[int]] = {}
    broker.subscriber("a", **QUICK, forward_to="b", ordered=True, max_workers=3)

    @broker.subscriber("b", **QUICK, ordered=True, max_workers=3)
    async def handle(body: int, message: SqlBrokerMessage) -> None:
        seen.setdefault(message.key or "", []).append(body)

    for n in range(30):
        await broker.publish(n, "a", key=str(n % 3))
    await broker.start()
    await look.archived(30)
    assert seen == {str(k): list(range(k, 30, 3)) for k in range(3)}


async def test_an_expired_message_is_not_moved(broker: SqlBroker, look: Look) -> None:
    broker.subscriber("a", **QUICK, forward_to="b")
    await broker.publish("x", "a", expires_in="1ms")
    sent = await look.in_state("PENDING")

    async def expired() -> bool:
        return await broker.config.store.server.read_now() > sent["expires_at"]

    await eventually(expired)
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["queue"]) == ("DISCARDED", "expired", "a")


async def test_a_policy_of_the_broker_is_for_handlers(engine: AsyncEngine, look: Look) -> None:
    broker = SqlBroker(engine, logger=None, ack_policy=AckPolicy.ACK_FIRST)
    await broker.create_tables()
    broker.subscriber("a", **QUICK, forward_to="b", ordered=True)
    await broker.start()
    await broker.publish("x", "a")
    await all_in(look, "b", 1)
    await broker.stop()


async def test_a_batch_is_moved_by_few_statements(broker: SqlBroker, look: Look) -> None:
    """200 messages: claimed and moved in batches, and FastStream's pipeline is never asked."""
    broker.subscriber("a", wakeup="poll", forward_to="b", fetch_batch_size=100)
    await broker.publish_batch(*range(200), queue="a")
    seen: list[str] = []

    @event.listens_for(broker.engine.sync_engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "update" in statement.lower() and re.search(r"\bmessage\b", statement):
            seen.append(statement)

    async def forbidden(*_: Any) -> None:
        raise AssertionError

    subscriber: Any = broker.subscribers[0]
    subscriber.process_message = forbidden
    await broker.start()
    await all_in(look, "b", 200)
    # Of claims and moves; on MySQL and MariaDB a SELECT … FOR UPDATE comes before each. A process
    # that stands still may claim in smaller parts, and renew leases; one by one it would be 400.
    assert 3 <= len(seen) <= 40, seen


async def test_a_prefix_is_for_both_ends(broker: SqlBroker, look: Look) -> None:
    got: list[str] = []

    async def handle(body: str) -> None:
        got.append(body)

    router = SqlBrokerRouter(
        "p.",
        [SqlBrokerRoute(None, "b", forward_to="c", **QUICK), SqlBrokerRoute(handle, "c", **QUICK)],
    )
    subscriber = router.subscriber("a", **QUICK, forward_to="b")
    outer = SqlBrokerRouter("o.", routers=[router])
    broker.include_router(outer)
    await broker.start()
    assert subscriber.forward_to == "o.p.b"
    await broker.publish("x", "o.p.a")
    await look.archived()
    assert got == ["x"]


async def test_a_forwarding_subscriber_starts_again_after_a_stop(
    broker: SqlBroker, look: Look
) -> None:
    broker.subscriber("a", **QUICK, forward_to="b")
    for n in range(2):
        await broker.start()
        await broker.publish("x", "a")
        await all_in(look, "b", n + 1)
        await broker.stop()


def test_a_handler_is_refused() -> None:
    subscriber = SqlBroker(URL, logger=None).subscriber("a", forward_to="b")

    async def handle(body: str) -> None: ...

    with pytest.raises(SetupError, match=r"so 'handle' would never run: omit forward_to, or"):
        subscriber(handle)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"forward_to": "a"}, r"forward_to='a' is a queue of the subscriber itself"),
        ({"forward_to": ""}, r"forward_to cannot be '': it must not be empty"),
        ({"forward_to": 7}, r"forward_to cannot be 7: it must be a string"),
        ({"forward_to": ["b"]}, r"forward_to cannot be \['b'\]"),
        ({"forward_to": "b", "transactional": True}, r"transactional is for handlers"),
        ({"forward_to": "b", "handler_timeout": 5}, r"handler_timeout is for handlers"),
        ({"forward_to": "b", "forward_headers": True}, r"forward_headers is for handlers"),
        ({"forward_to": "b", "ack_policy": AckPolicy.ACK_FIRST}, r"ack_policy is for handlers"),
        ({"forward_to": "b", "decoder": print}, r"decoder is for handlers"),
        ({"forward_to": "b", "no_reply": True}, r"no_reply is for handlers"),
        (
            {"forward_to": DESTINATION, "retain_in_archive_on_reject": False},
            r"would delete them: omit retain_in_archive_on_reject",
        ),
    ],
)
def test_impossible_forwards_are_refused(options: Any, problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        SqlBroker(URL, logger=None).subscriber("a", "x", **options)


def test_a_route_without_anything_is_refused() -> None:
    with pytest.raises(SetupError, match="a route without a handler needs forward_to="):
        SqlBrokerRoute(None, "a")
    with pytest.raises(SetupError, match="takes no publishers"):
        SqlBrokerRoute(None, "a", forward_to="b", publishers=[SqlBrokerPublisher("c")])
    with pytest.raises(SetupError, match="would never run"):
        SqlBrokerRouter(handlers=[SqlBrokerRoute(lambda body: None, "a", forward_to="b")])


async def test_forwarders_that_are_each_others_dead_letter_queue_are_refused_at_the_start(
    broker: SqlBroker,
) -> None:
    broker.subscriber("a", **QUICK, forward_to="c", dead_letter_queue="b")
    broker.subscriber("b", **QUICK, forward_to=DESTINATION, dead_letter_queue="a")
    with pytest.raises(
        SetupError, match=r"the dead letter queues of .* form a loop: (a → b → a|b → a → b)\."
    ):
        await broker.start()


async def test_a_handler_may_be_the_dead_letter_queue_of_a_forwarder_that_is_its_own(
    broker: SqlBroker,
) -> None:
    broker.subscriber("a", **QUICK, forward_to="c", dead_letter_queue="b")

    @broker.subscriber("b", **QUICK, dead_letter_queue="a")
    async def handle(body: str) -> None: ...

    await broker.start()


async def test_a_loop_of_forwards_is_warned_of_at_the_start(
    broker: SqlBroker, heard: Heard
) -> None:
    broker.subscriber("a", **QUICK, forward_to="b")
    router = SqlBrokerRouter()
    router.subscriber("b", **QUICK, forward_to="a")
    broker.include_router(router)
    await broker.start()
    [said] = heard.texts("forward_to forms a loop: ", logging.WARNING)
    assert "a → b → a" in said or "b → a → b" in said
