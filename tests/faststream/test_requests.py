"""request: publish a message and wait for the reply to it."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from faststream import BaseMiddleware, Response
from faststream.exceptions import AckMessage
from sqlalchemy import Table, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    BrokerStoppedError,
    ConstantRetryStrategy,
    NotSupportedError,
    PublishError,
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlBrokerRouter,
    TransientStoreError,
)
from faststream_sqlbroker.core.clock import RealTime
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.parts.replies import SCOPE
from faststream_sqlbroker.database.replies import ReplyStore
from faststream_sqlbroker.flow.tasks.requests import LISTENING_POLL, MAX_TIMEOUT, POLL
from faststream_sqlbroker.message import SqlBrokerMessage as MessageOfHandlers
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`request`: the answer of a handler, and `--rpc`")

on_one = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
LONG = 120.0
"""Seconds; no reply takes so long."""
SHORT = 0.3
"""Seconds after which a request gives up for which no reply comes, if `OutOfTime` does not say
when."""
AGAIN = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=5)


async def echo(body: Any) -> Any:
    return body


def answering(broker: SqlBroker, handler: Any = echo, queue: str = "q", **options: Any) -> None:
    broker.subscriber(queue, **{**QUICK, **options})(handler)


async def noted_queues(look: Look) -> list[str]:
    table: Table = look.tables.policy_state
    async with look.engine.connect() as connection:
        found = await connection.execute(select(table.c.key).where(table.c.scope == SCOPE))
        return list(found.scalars())


class OutOfTime(RealTime):
    """Real time, but requests of `SHORT` seconds give up when they are told to: not before they are
    written, however slow that is."""

    def __init__(self, broker: SqlBroker) -> None:
        self._waiting: list[asyncio.Timeout] = []
        self._requests = broker._requests
        broker._clock.use(self)

    @asynccontextmanager
    async def timeout(  # type: ignore[override]
        self, seconds: float | None
    ) -> AsyncIterator[asyncio.Timeout]:
        async with asyncio.timeout(None if seconds == SHORT else seconds) as scope:
            if seconds == SHORT:
                self._waiting.append(scope)
            yield scope

    async def gives_up(self, request: Awaitable[Any], when: Callable[[], Any], **said: str) -> None:
        """The `request` that has begun raises TimeoutError once `when` is true: no reply is there
        then."""
        caller = asyncio.ensure_future(request)
        await eventually(when)
        self._requests._hint(frozenset())
        await self._requests.tick()
        assert not caller.done()
        for scope in self._waiting:
            scope.reschedule(asyncio.get_running_loop().time())
        self._waiting.clear()
        with pytest.raises(TimeoutError, **said):
            await caller


class CountedReads:
    """Counts how often replies are looked for, and lets the first looks fail."""

    def __init__(self, failures: int = 0) -> None:
        self.count = 0
        self._failures = failures
        self._read = ReplyStore.read_replies

    async def __call__(self, store: ReplyStore, queue: str) -> Any:
        self.count += 1
        if self.count <= self._failures:
            raise TransientStoreError("the database is away")
        return await self._read(store, queue)

    def patched(self) -> Any:
        async def read(store: ReplyStore, queue: str) -> Any:
            return await self(store, queue)

        return patch.object(ReplyStore, "read_replies", read)


async def test_the_reply_is_returned_and_nothing_of_it_is_kept(
    broker: SqlBroker, look: Look
) -> None:
    async def handle(body: dict[str, int]) -> Response:
        return Response({"sum": body["a"] + body["b"]}, headers={"custom": "1"})

    answering(broker, handle)
    await broker.start()
    reply = await broker.request({"a": 1, "b": 2}, "q", timeout=LONG, correlation_id="c")
    assert isinstance(reply, MessageOfHandlers)
    assert await reply.decode() == {"sum": 3}
    assert (reply.correlation_id, reply.headers["custom"]) == ("c", "1")
    assert reply.source_type.value == "RESPONSE"
    await reply.ack()
    [row] = await look.archived()
    assert (row["queue"], row["state"]) == ("q", "COMPLETED")
    assert row["expires_at"] is not None
    # Nothing remains of the queue of replies once the broker has stopped.
    assert len(await noted_queues(look)) == 1
    await broker.stop()
    assert await noted_queues(look) == []


async def test_concurrent_requests_share_one_queue_and_get_their_own_replies(
    broker: SqlBroker, look: Look
) -> None:
    """Also with one correlation id: the reply names the request."""
    asked: set[str] = set()

    async def handle(body: int, message: SqlBrokerMessage) -> int:
        asked.add(message.reply_to)
        return body

    answering(broker, handle, max_workers=10)
    await broker.start()
    replies = await asyncio.gather(
        *(broker.request(n, "q", timeout=LONG, correlation_id="same") for n in range(100))
    )
    assert [await reply.decode() for reply in replies] == list(range(100))
    assert len(asked) == 1
    assert {reply.correlation_id for reply in replies} == {"same"}
    await look.archived(100)


async def test_a_late_reply_is_dropped(broker: SqlBroker, look: Look) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    async def handle(body: str) -> str:
        begun.set()
        await end.wait()
        return body

    answering(broker, handle)
    time = OutOfTime(broker)
    await broker.start()
    request = broker.request("x", "q", timeout=SHORT, expires_in="1h")
    said = r"no reply to the request to queue 'q' within 0.3 s"
    await time.gives_up(request, begun.is_set, match=said)
    end.set()
    [row] = await look.archived()
    assert row["queue"] == "q"


async def test_a_request_that_no_handler_has_started_expires(broker: SqlBroker, look: Look) -> None:
    async def are_written(count: int) -> bool:
        return len(await look.rows()) == count

    time = OutOfTime(broker)
    for count, options in enumerate(({}, {"expires_in": "1h"}), 1):
        body = "kept" if options else "late"
        request = broker.request(body, "q", timeout=SHORT, **options)  # type: ignore[arg-type]
        await time.gives_up(request, partial(are_written, count))
    await asyncio.sleep(1.1 * SHORT)  # the first has expired
    handled: list[str] = []

    async def handle(body: str) -> None:
        handled.append(body)

    answering(broker, handle)
    await broker.start()
    rows = await look.archived(2)
    assert [(row["state"], row["reason"]) for row in rows] == [
        ("DISCARDED", "expired"),
        ("COMPLETED", None),
    ]
    assert handled == ["kept"]


async def test_a_cancelled_caller_leaves_nothing_that_waits(broker: SqlBroker, look: Look) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    async def handle(body: str) -> str:
        begun.set()
        await end.wait()
        return body

    answering(broker, handle)
    await broker.start()
    caller = asyncio.create_task(broker.request("x", "q", timeout=LONG))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    requests = broker._requests
    assert requests._pending == {}
    end.set()
    # The hint of the late reply wakes the loop once, and the reply is deleted.
    await look.archived()
    assert await requests.tick() is None


@on_one
async def test_replies_are_looked_for_only_while_a_request_waits(broker: SqlBroker) -> None:
    answering(broker)
    time = OutOfTime(broker)
    await broker.start()
    reads = CountedReads()
    with reads.patched():
        request = broker.request("x", "nothing", timeout=SHORT)
        await time.gives_up(request, lambda: reads.count >= 3)
        while_waiting = reads.count
        assert await broker._requests.tick() is None
        await asyncio.sleep(20 * POLL)
        assert reads.count == while_waiting


@on_one
async def test_how_often_replies_are_looked_for(broker: SqlBroker) -> None:
    """Every 10 ms without wake-ups of other processes; with them, seldom."""
    caller = asyncio.create_task(broker.request("x", "nothing", timeout=LONG))
    requests = broker._requests
    await eventually(lambda: requests._poll_at < inf)
    for listening, expected in ((False, POLL), (True, LISTENING_POLL)):
        broker._wakeups.is_listening = listening
        requests._hint(frozenset())
        assert await requests.tick() == expected
        left = await requests.tick()
        assert left is not None
        assert left <= expected
    caller.cancel()
    await asyncio.wait((caller,))


async def test_a_database_that_fails_for_a_moment_costs_no_reply(broker: SqlBroker) -> None:
    answering(broker)
    await broker.start()
    reads = CountedReads(failures=2)
    with reads.patched():
        reply = await broker.request("x", "q", timeout=LONG)
    assert await reply.decode() == "x"
    assert reads.count > 2


async def test_a_second_reply_is_deleted(broker: SqlBroker, look: Look) -> None:
    """A redelivered request is answered twice."""

    async def handle(body: str, message: SqlBrokerMessage) -> str:
        headers = {"reply_id": message.headers["reply_id"]}
        await broker.publish("first", message.reply_to, headers=headers)
        return body

    answering(broker, handle)
    await broker.start()
    reply = await broker.request("second", "q", timeout=LONG)
    assert await reply.decode() == "first"
    await look.archived()


async def test_a_handler_that_fails_sends_no_reply_until_it_succeeds(broker: SqlBroker) -> None:
    runs: list[str] = []

    async def handle(body: str) -> str:
        runs.append(body)
        if body == "never" or len(runs) < 3:
            raise RuntimeError("it fails")
        return body

    answering(broker, handle, retry_strategy=AGAIN)
    answering(broker, handle, "once", retry_strategy=None)
    await broker.start()
    assert await (await broker.request("x", "q", timeout=LONG)).decode() == "x"
    with pytest.raises(TimeoutError):
        await broker.request("never", "once", timeout=SHORT)


@on_one
async def test_a_handler_that_acks_by_an_exception_sends_no_reply(
    broker: SqlBroker, look: Look
) -> None:
    async def handle(body: str) -> str:
        raise AckMessage

    answering(broker, handle)
    time = OutOfTime(broker)
    await broker.start()
    request = broker.request("x", "q", timeout=SHORT, expires_in="1h")
    await time.gives_up(request, lambda: look.rows(archive=True))


@on_one
async def test_no_reply_of_a_subscriber_without_replies(broker: SqlBroker, look: Look) -> None:
    answering(broker, no_reply=True)
    time = OutOfTime(broker)
    await broker.start()
    request = broker.request("x", "q", timeout=SHORT, expires_in="1h")
    await time.gives_up(request, lambda: look.rows(archive=True))


async def test_a_reply_that_the_handler_publishes_itself(broker: SqlBroker, look: Look) -> None:
    """It is known by its correlation id."""

    async def handle(body: str, message: SqlBrokerMessage) -> None:
        await broker.publish(body * 2, message.reply_to, correlation_id=message.correlation_id)

    answering(broker, handle, no_reply=True)
    await broker.start()
    assert await (await broker.request("x", "q", timeout=LONG)).decode() == "xx"
    await look.archived()


@on_one
async def test_publishers_and_routers_request_too(broker: SqlBroker) -> None:
    router = SqlBrokerRouter(prefix="sub.")
    seen: list[dict[str, Any]] = []

    @router.subscriber("q", **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> str:
        seen.append(message.headers)
        return body

    publisher = router.publisher("q", headers={"own": 1, "both": 1}, reply_to="elsewhere")
    broker.include_router(router)
    await broker.start()
    reply = await publisher.request("x", timeout=LONG, correlation_id="1", headers={"both": 2})
    assert (await reply.decode(), reply.correlation_id) == ("x", "1")
    assert (seen[0]["own"], seen[0]["both"]) == (1, 2)
    other = await broker.publisher("").request("y", "sub.q", timeout=LONG)
    assert await other.decode() == "y"


class Doubling(BaseMiddleware):
    """Doubles each body that comes in, before and after it is parsed."""

    async def on_receive(self) -> None:
        self.msg.payload = self.msg.payload * 2
        await super().on_receive()

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: Any) -> Any:
        msg.body = msg.body * 2
        return await call_next(msg)


@on_one
@pytest.mark.parametrize("through", ["broker", "publisher", "router"])
async def test_middlewares_see_the_request_and_the_reply(engine: AsyncEngine, through: str) -> None:
    middlewares = (Doubling,)
    broker = SqlBroker(engine, logger=None, middlewares=() if through == "router" else middlewares)
    router = SqlBrokerRouter(middlewares=middlewares if through == "router" else ())
    router.subscriber("q", **QUICK)(echo)
    publisher = router.publisher("q")
    broker.include_router(router)
    await broker.create_tables()
    async with broker:
        await broker.start()
        if through == "broker":
            reply = await broker.request("x", "q", timeout=LONG)
        else:
            reply = await publisher.request("x", timeout=LONG)
        assert await reply.decode() == "x" * 16


@on_one
async def test_the_brokers_parser_and_decoder_read_the_reply(engine: AsyncEngine) -> None:
    async def parser(row: Any, original: Callable[[Any], Awaitable[Any]]) -> Any:
        message = await original(row)
        message.headers["parsed"] = True
        return message

    async def decoder(message: Any, original: Callable[[Any], Awaitable[Any]]) -> Any:
        return [await original(message)]

    broker = SqlBroker(engine, logger=None, parser=parser, decoder=decoder, apply_types=False)
    answering(broker)
    await broker.create_tables()
    async with broker:
        await broker.start()
        reply = await broker.request("x", "q", timeout=LONG)
        # The handler has got ["x"].
        assert await reply.decode() == [["x"]]
        assert reply.headers["parsed"]


class Reversing:
    """A codec that turns text round."""

    async def encode(self, msg: Any, serializer: Any = None) -> tuple[bytes, str | None]:
        return str(msg)[::-1].encode(), "reversed"

    async def decode(self, msg: Any) -> Any:
        return msg.body.decode()[::-1]


@on_one
async def test_the_brokers_codec_reads_the_reply(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None, codec=Reversing())
    answering(broker)
    await broker.create_tables()
    async with broker:
        await broker.start()
        reply = await broker.request("abc", "q", timeout=LONG)
        assert (reply.body, await reply.decode()) == (b"cba", "abc")


@on_one
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("connection", object()),
        ("session", object()),
        ("with_ack", True),
        ("delay", 1),
        ("next_attempt_at", 1.0),
        ("dedup_id", "d"),
        ("reply_to", "r"),
    ],
)
async def test_options_of_publish_that_a_request_cannot_keep(
    broker: SqlBroker, option: str, value: object, look: Look
) -> None:
    options: Any = {option: value}
    for request in (broker.request, broker.publisher("q").request):
        with pytest.raises(PublishError, match=f"request does not take {option}="):
            await request("x", "q", **options)
    with pytest.raises(TypeError, match="unknown"):
        await broker.request("x", "q", unknown=1)  # type: ignore[call-arg]
    assert await look.rows() == []


@on_one
async def test_timeouts_of_every_kind(broker: SqlBroker) -> None:
    answering(broker)
    await broker.start()
    for timeout in ("30s", None, 2 * MAX_TIMEOUT):
        assert await (await broker.request("x", "q", timeout=timeout)).decode() == "x"
    for short in (1e-24, 0):
        with pytest.raises(TimeoutError):
            await broker.request("x", "q", timeout=short)
    with pytest.raises(SetupError, match="timeout must be 0 or more"):
        await broker.request("x", "q", timeout=-1)


@on_one
async def test_a_body_that_brings_a_dedup_id_is_refused_if_it_is_not_stored(
    broker: SqlBroker,
) -> None:
    await broker.publish("first", "q", dedup_id="d")
    with pytest.raises(PublishError, match="will get no reply: omit dedup_id"):
        await broker.request(SqlBrokerResponse("x", dedup_id="d"), "q", timeout=LONG)


@on_servers
async def test_a_transactional_handlers_request_is_committed_by_itself(
    broker: SqlBroker, look: Look
) -> None:
    """It would wait for ever in the handler's transaction, which is rolled back here."""
    replies: list[Any] = []

    async def ask(body: str) -> None:
        reply = await broker.request(body, "inner", timeout=LONG)
        replies.append(await reply.decode())
        raise RuntimeError("roll back")

    answering(broker, ask, transactional=True, retry_strategy=None)
    answering(broker, queue="inner")
    await broker.start()
    await broker.publish("x", "q")
    rows = await look.archived(2)
    assert {row["queue"]: row["state"] for row in rows} == {"inner": "COMPLETED", "q": "FAILED"}
    assert replies == ["x"]


@on_one
async def test_sqlite_refuses_a_request_of_a_transactional_handler(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    refused: list[Exception] = []

    async def ask(body: str) -> None:
        try:
            await broker.request(body, "inner", timeout=LONG)
        except NotSupportedError as error:
            refused.append(error)

    answering(broker, ask, transactional=True)
    await broker.start()
    await broker.publish("x", "q")
    await look.archived()
    assert "blocks all other writers" in str(refused[0])


async def test_a_handlers_request(broker: SqlBroker, look: Look) -> None:
    async def ask(body: str) -> str:
        reply = await broker.request(body, "inner", timeout=LONG)
        return f"outer {await reply.decode()}"

    answering(broker, ask)
    answering(broker, queue="inner")
    await broker.start()
    assert await (await broker.request("x", "q", timeout=LONG)).decode() == "outer x"
    await look.archived(2)


@on_one
async def test_a_request_that_is_forwarded_first(broker: SqlBroker) -> None:
    broker.subscriber("q", **QUICK, forward_to="end")
    answering(broker, queue="end")
    await broker.start()
    assert await (await broker.request("x", "q", timeout=LONG)).decode() == "x"


@on_one
async def test_a_batch_handler_answers_its_first_message(broker: SqlBroker) -> None:
    async def handle(bodies: list[str]) -> list[str]:
        return bodies

    answering(broker, handle, batch=True)
    await broker.start()
    assert await (await broker.request("x", "q", timeout=LONG)).decode() == ["x"]


@on_one
async def test_a_stop_ends_requests_that_wait(broker: SqlBroker, look: Look) -> None:
    """The queue of replies stays noted, as a reply may still come."""
    caller = asyncio.create_task(broker.request("x", "nothing", timeout=LONG))
    await eventually(lambda: broker._requests._pending)
    await eventually(lambda: noted_queues(look))
    await broker.stop()
    with pytest.raises(BrokerStoppedError, match="was stopped"):
        await caller
    [queue] = await noted_queues(look)
    answering(broker)
    await broker.start()
    assert await (await broker.request("y", "q", timeout=LONG)).decode() == "y"
    assert len({queue, *await noted_queues(look)}) == 2


@on_one
async def test_a_stop_deletes_the_replies_that_are_left(broker: SqlBroker, look: Look) -> None:
    answering(broker)
    await broker.start()
    await broker.request("x", "q", timeout=LONG)
    [queue] = await noted_queues(look)
    await broker._store.insert([NewMessage(queue, b"late")])
    await broker.stop()
    assert await look.rows() == []
    assert await noted_queues(look) == []


@on_one
async def test_request_connects_the_broker(engine: AsyncEngine, look: Look) -> None:
    """`faststream publish --rpc` does not start it."""
    responder = SqlBroker(engine, logger=None)
    answering(responder)
    await responder.create_tables()
    async with responder, SqlBroker(engine, logger=None) as asking:
        await responder.start()
        assert await (await asking.request("x", "q", timeout=LONG)).decode() == "x"
    async with engine.connect() as connection:
        left = await connection.execute(text("SELECT count(*) FROM message"))
        assert left.scalar_one() == 0


def test_a_broker_requests_in_one_event_loop_after_another(tmp_path: Path) -> None:
    """Though it was not stopped in between."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'a.db'}"
    asking = SqlBroker(url, logger=None)

    async def ask() -> str:
        responder = SqlBroker(url, logger=None)
        answering(responder)
        await responder.create_tables()
        async with responder:
            await responder.start()
            reply = await asking.request("x", "q", timeout=LONG)
            return str(await reply.decode())

    assert [asyncio.run(ask()) for _ in range(2)] == ["x", "x"]


@on_one
async def test_a_forked_process_has_a_queue_of_its_own(broker: SqlBroker) -> None:
    requests = broker._requests
    first = requests.create_address()
    assert requests.create_address().queue == first.queue
    with patch("os.getpid", return_value=os.getpid() + 1):
        assert requests.create_address().queue != first.queue
