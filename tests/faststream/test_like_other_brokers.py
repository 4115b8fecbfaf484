"""Features of FastStream's other brokers that work here, too."""

import asyncio
import json
import sys
import uuid
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from faststream import AckPolicy, BaseMiddleware, Context, Depends
from faststream.exceptions import AckMessage, NackMessage, RejectMessage
from faststream.exceptions import SetupError as FastStreamSetupError
from faststream.kafka import KafkaBroker, KafkaRouter
from faststream.message import gen_cor_id
from faststream.nats import NatsRouter
from faststream.rabbit import RabbitRouter
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from typer.testing import CliRunner

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    PublishError,
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerMessageState,
    SqlBrokerPublisher,
    SqlBrokerResponse,
    SqlBrokerRoute,
    SqlBrokerRouter,
    SqlConnection,
    SqlSession,
)
from tests.faststream.conftest import QUICK, Heard, Look, Make
from tests.faststream.test_publish import headers_of
from tests.helpers import eventually

on_one = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
AGAIN = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=5)


class Packed:
    """A codec that only this test can read; counts how often it is asked for a batch."""

    def __init__(self) -> None:
        self.batches = 0

    async def encode(self, msg: Any, serializer: Any = None) -> tuple[bytes, str | None]:
        return zlib.compress(json.dumps(msg).encode()), "packed"

    async def decode(self, msg: Any) -> Any:
        return json.loads(zlib.decompress(msg.body))

    async def encode_batch(
        self, msgs: Any, serializer: Any = None
    ) -> list[tuple[bytes, str | None]]:
        self.batches += 1
        return [await self.encode(msg) for msg in msgs]

    async def decode_batch(self, msg: Any) -> list[Any]:
        return [json.loads(zlib.decompress(body)) for body in msg.body]


# -- unknown options of control exceptions ---------------------------------------------------------


@pytest.mark.parametrize("batch", [False, True])
async def test_unknown_options_of_a_nack_are_ignored(
    broker: SqlBroker, look: Look, heard: Heard, batch: bool
) -> None:
    calls: list[Any] = []

    @broker.subscriber("q", retry_strategy=AGAIN, batch=batch, **QUICK)
    async def handle(body: Any) -> None:
        calls.append(body)
        if len(calls) < 3:
            raise NackMessage(requeue=True)

    await broker.start()
    await broker.publish(1, "q")
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"], len(calls)) == ("COMPLETED", 3, 3)
    assert heard.texts("nack() of a message takes delay: requeue is ignored") == heard.texts(
        "ignored"
    )
    assert len(heard.texts("ignored")) == 1


@pytest.mark.parametrize(
    "policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.REJECT_ON_ERROR, AckPolicy.ACK]
)
@on_one
async def test_unknown_options_together_with_known_ones(
    broker: SqlBroker, look: Look, heard: Heard, policy: AckPolicy
) -> None:
    @broker.subscriber("q", ack_policy=policy, retry_strategy=AGAIN, **QUICK)
    async def handle(body: str) -> None:
        if body == "ack":
            raise AckMessage(multiple=True)
        if body == "reject":
            raise RejectMessage(requeue=False, reason="mine")
        raise NackMessage(delay="1h", multiple=True)

    await broker.start()
    await broker.publish_batch("ack", "reject", "nack", queue="q")
    rows = await eventually(lambda: _ended(look, 2))
    assert {(row["state"], row["reason"]) for row in rows} == {
        ("COMPLETED", None),
        ("FAILED", "mine"),
    }
    [waiting] = await eventually(lambda: _waiting(look))
    assert (waiting["next_attempt_at"] - waiting["created_at"]).total_seconds() > 3000
    assert len(heard.texts("ignored")) == 3


async def _ended(look: Look, count: int) -> Any:
    rows = await look.rows(archive=True)
    return rows if len(rows) == count else None


async def _waiting(look: Look) -> Any:
    return [row for row in await look.rows() if row["state"] == "RETRYABLE"]


@on_one
async def test_unknown_options_of_a_call(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("by hand", ack_policy=AckPolicy.MANUAL, **QUICK)
    async def by_hand(body: Any, message: SqlBrokerMessage) -> None:
        await message.ack(multiple=True)

    await broker.start()
    await broker.publish(1, "by hand")
    [row] = await look.archived()
    assert row["state"] == "COMPLETED"


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("method", ["ack", "nack", "reject"])
@on_one
async def test_requeue_is_refused_where_it_is_given(
    broker: SqlBroker, look: Look, batch: bool, method: str
) -> None:
    """It chooses between methods that are two here."""

    @broker.subscriber("q", retry_strategy=None, batch=batch, **QUICK)
    async def handle(body: Any, message: Annotated[Any, Context()]) -> None:
        await getattr(message, method)(requeue=True)

    await broker.start()
    await broker.publish(1, "q")
    [row] = await look.archived()
    assert row["state"] == "FAILED"
    assert f"{method}() of a message does not take requeue=: use nack()" in row["last_error"]


# -- options and routers of other brokers ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("routing_key", "use queue"),
        ("topic", "use queue"),
        ("expiration", "use expires_in"),
        ("partition", "use key"),
        ("prioriti", "did you mean 'priority'?"),
        ("zzz", "choose from priority, key, "),
    ],
)
@on_one
async def test_an_unknown_option_of_a_publish_names_ours(
    broker: SqlBroker, name: str, advice: str
) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(SetupError, match=f"a publisher has no option {name!r}: "):
        broker.publisher("q", **options)
    publisher = broker.publisher("q")
    for call in (broker.publish, broker.publish_batch, publisher.publish, broker.request):
        with pytest.raises(TypeError) as caught:
            await call(1, queue="q", **options)
        assert str(caught.value).startswith(f"a publish has no option {name!r}: {advice}")


def test_a_router_of_another_broker_is_refused() -> None:
    broker = SqlBroker("sqlite+aiosqlite:///never-made.db")
    others: list[Any] = [KafkaRouter(), RabbitRouter(), NatsRouter(), KafkaBroker()]
    for other in others:
        for include in (
            broker.include_router,
            broker.include_routers,
            SqlBrokerRouter().include_router,
            lambda other: SqlBroker("sqlite+aiosqlite:///never-made.db", routers=[other]),
            lambda other: SqlBrokerRouter(routers=[other]),
        ):
            with pytest.raises(
                SetupError,
                match=f"{type(other).__name__} belongs to another broker: ",
            ):
                include(other)
    assert broker.routers == []


# -- what publish middlewares see ------------------------------------------------------------------


class Seen(BaseMiddleware):
    """Keeps the commands of publishes, and changes their bodies as `change` says."""

    commands: list[Any]
    change: Any = staticmethod(tuple)

    async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
        self.commands.append(cmd)
        bodies = self.change(cmd.batch_bodies)
        if bodies != cmd.batch_bodies:
            cmd.batch_bodies = bodies
        return await call_next(cmd)


def seeing(change: Any = tuple) -> type[Seen]:
    return type("Seeing", (Seen,), {"commands": [], "change": staticmethod(change)})


@on_one
async def test_middlewares_see_bodies_and_not_responses(make: Make, look: Look) -> None:
    seen = seeing()
    broker = make(middlewares=[seen])
    await broker.create_tables()
    publisher = broker.publisher("out", batch=True)

    @broker.subscriber("in", **QUICK)
    @publisher
    async def handle(body: Any) -> Any:
        return [None, SqlBrokerResponse("answer", priority=5)]

    await broker.publish(SqlBrokerResponse("one", priority=1), "q")
    await broker.publish_batch(None, SqlBrokerResponse("two", key="k"), "three", queue="q")
    await publisher.publish_batch(SqlBrokerResponse(None, priority=2))
    await broker.start()
    await broker.publish("x", "in")
    await eventually(lambda: _ended(look, 1))
    await broker.stop()
    assert [cmd.batch_bodies for cmd in seen.commands] == [
        ("one",),
        (None, "two", "three"),
        (None,),
        ("x",),
        (None, "answer"),
    ]
    assert [(bytes(r["payload"]), r["priority"], r["key"]) for r in await look.rows()] == [
        (b"one", 1, None),
        (b"", 0, None),
        (b"two", 0, "k"),
        (b"three", 0, None),
        (b"", 2, None),
        (b"", 0, None),
        (b"answer", 5, None),
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda bodies: bodies[::-1], [("c", None), ("b", "kb"), ("a", "ka")]),
        (lambda bodies: bodies[1:], [("b", "kb"), ("c", None)]),
        (lambda bodies: (*bodies, "d"), [("a", "ka"), ("b", "kb"), ("c", None), ("d", None)]),
        (lambda bodies: [b.upper() for b in bodies], [("A", "ka"), ("B", "kb"), ("C", None)]),
        (lambda _bodies: (), []),
    ],
    ids=["turned", "fewer", "more", "others", "none"],
)
@on_one
async def test_options_stay_with_their_bodies(
    make: Make, look: Look, change: Any, expected: Any
) -> None:
    broker = make(middlewares=[seeing(change)])
    await broker.create_tables()
    messages = SqlBrokerResponse("a", key="ka"), SqlBrokerResponse("b", key="kb"), "c"
    ids = await broker.publish_batch(*messages, queue="q")
    found = [(bytes(row["payload"]).decode(), row["key"]) for row in await look.rows()]
    assert (found, len(ids)) == (expected, len(expected))


@on_one
async def test_a_middleware_cannot_lose_options(make: Make, look: Look) -> None:
    broker = make(middlewares=[seeing(lambda bodies: [b.upper() for b in bodies[1:]])])
    await broker.create_tables()
    with pytest.raises(PublishError, match="returned 1 other bodies for 2 messages with options"):
        await broker.publish_batch(SqlBrokerResponse("a", delay=5), "b", queue="q")
    assert await look.rows() == []
    assert len(await broker.publish_batch("a", "b", queue="q")) == 1


@on_one
async def test_a_middleware_cannot_swap_options(make: Make, look: Look) -> None:
    broker = make(middlewares=[seeing(lambda bodies: [bodies[1].upper(), bodies[0]])])
    await broker.create_tables()
    with pytest.raises(PublishError, match="replace bodies, or change their number or order"):
        await broker.publish_batch(
            SqlBrokerResponse("a", delay=5), SqlBrokerResponse("b", key="k"), queue="q"
        )
    assert await look.rows() == []


@pytest.mark.parametrize(
    ("bodies", "change"),
    [
        ((1, 2, 3), lambda body: body + 1),
        ((True, False), lambda body: not body),
        (("new", "paid"), {"new": "paid", "paid": "done"}.get),
    ],
    ids=["numbers", "truths", "texts"],
)
@on_one
async def test_equal_bodies_are_not_taken_for_each_other(
    make: Make, look: Look, bodies: Any, change: Any
) -> None:
    """They may be one object, and each of another message."""
    broker = make(middlewares=[seeing(lambda given: [change(body) for body in given])])
    await broker.create_tables()
    first, second, *others = bodies
    with pytest.raises(PublishError, match="replace bodies, or change their number or order"):
        await broker.publish_batch(
            first, SqlBrokerResponse(second, queue="other"), *others, queue="q"
        )
    assert await look.rows() == []
    assert len(await broker.publish_batch(*bodies, queue="q")) == len(bodies)


@on_one
async def test_a_batch_publisher_takes_several_messages(broker: SqlBroker, look: Look) -> None:
    """As Kafka's; the second is no queue."""
    publisher = broker.publisher("out", batch=True)
    ids = await publisher.publish(1, "hi", headers={"a": "b"})
    assert await publisher.publish() == []
    assert await publisher.publish(SqlBrokerResponse(2), queue="elsewhere") != []
    rows = await look.rows()
    assert [row["id"] for row in rows[:2]] == ids
    assert [(row["queue"], bytes(row["payload"])) for row in rows] == [
        ("out", b"1"),
        ("out", b"hi"),
        ("elsewhere", b"2"),
    ]


# -- codecs and ids --------------------------------------------------------------------------------


async def test_the_codec_of_a_router_encodes_for_its_publishers(broker: SqlBroker) -> None:
    codec = Packed()
    router = SqlBrokerRouter(codec=codec)
    by_hand = router.publisher("packed")
    seen: list[Any] = []

    @router.subscriber("packed", **QUICK)
    @router.publisher("answers")
    async def handle(body: Any) -> Any:
        seen.append(body)
        return {"answer": body}

    @router.subscriber("answers", batch=True, **QUICK)
    async def collect(bodies: list[Any]) -> None:
        seen.extend(bodies)

    broker.include_router(router)
    await broker.start()
    await by_hand.publish({"n": 1})
    await by_hand.publish_batch({"n": 2}, {"n": 3})
    expected = [{"n": n} for n in (1, 2, 3)]
    expected += [{"answer": body} for body in expected]
    await eventually(lambda: len(seen) == len(expected))
    assert sorted(map(str, seen)) == sorted(map(str, expected))
    assert codec.batches == 1


async def test_encode_batch_is_called(engine: AsyncEngine, look: Look) -> None:
    codec = Packed()
    broker = SqlBroker(engine, logger=None, codec=codec)
    await broker.create_tables()
    await broker.publish_batch("a", SqlBrokerResponse("b", priority=3), queue="q")
    assert codec.batches == 1
    rows = await look.rows()
    assert [json.loads(zlib.decompress(bytes(row["payload"]))) for row in rows] == ["a", "b"]
    assert [row["priority"] for row in rows] == [0, 3]


@on_one
async def test_a_batch_that_is_encoded_incompletely_is_refused(
    engine: AsyncEngine, look: Look
) -> None:
    class Loses(Packed):
        async def encode_batch(
            self, msgs: Any, serializer: Any = None
        ) -> list[tuple[bytes, str | None]]:
            return (await super().encode_batch(msgs))[1:]

    broker = SqlBroker(engine, logger=None, codec=Loses())
    await broker.create_tables()
    with pytest.raises(
        PublishError,
        match=r"Loses\.encode_batch must return one body for each message, got 1 for 2",
    ):
        await broker.publish_batch("a", "b", queue="q")
    assert await look.rows() == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_uuids_as_correlation_ids(engine: AsyncEngine, look: Look) -> None:
    """FastStream's own generator is used if it is given; by default nothing is stored."""
    for number, options in enumerate(({"id_generator": gen_cor_id}, {})):
        broker = SqlBroker(engine, logger=None, **options)
        await broker.create_tables()
        await broker.publish("x", f"q{number}")
        await broker.publisher(f"q{number}").publish("y")
        await broker.stop()
    given = [(row["headers"] or {}).get("correlation_id") for row in await look.rows()]
    assert given[2:] == [None, None]
    assert [str(uuid.UUID(each)) for each in given[:2]] == given[:2]
    assert given[0] != given[1]


@on_one
async def test_a_middleware_reads_the_correlation_id_that_the_handler_sees(
    make: Make, look: Look
) -> None:
    """It is made when it is read, and stored then only."""

    read: list[str] = []

    class Reads(BaseMiddleware):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            if cmd.destination != "unread":
                read.append(cmd.correlation_id)
            return await call_next(cmd)

    broker = make(middlewares=[Reads])
    await broker.create_tables()
    seen: list[str] = []

    @broker.subscriber("in", **QUICK)
    @broker.publisher("out")
    async def handle(body: Any, message: SqlBrokerMessage) -> Any:
        seen.append(message.correlation_id)
        return body

    await broker.publish_batch(1, 2, queue="unread")
    await broker.publish(1, "unread", correlation_id="mine")
    await broker.publisher("q").publish(1)
    await broker.publish(1, "q", correlation_id="given")
    stored = [headers_of(row).get("correlation_id") for row in await look.rows()]
    assert stored == [None, None, "mine", *read]
    assert read[1] == "given"
    await broker.start()
    await broker.publish("x", "in")
    await eventually(lambda: _ended(look, 1))
    await broker.stop()
    # Of the publish, the handler, and its answer.
    assert read[2:] == [*seen, *seen]
    assert str(uuid.UUID(seen[0])) == seen[0]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_the_id_generator_is_used(engine: AsyncEngine, look: Look) -> None:
    ids = iter(f"id-{n}" for n in range(100))
    broker = SqlBroker(engine, logger=None, id_generator=lambda: next(ids))
    await broker.create_tables()
    publisher = broker.publisher("q")
    await broker.publish(1, "q")
    await broker.publish_batch(1, 2, queue="q")
    await publisher.publish(1)
    await publisher.publish_batch(1, 2)
    await broker.publish(1, "q", correlation_id="mine")
    found = [headers_of(row)["correlation_id"] for row in await look.rows()]
    assert found == ["id-0", "id-1", "id-1", "id-2", "id-3", "id-3", "mine"]
    synchronous = create_engine(make_url(engine.url).set(drivername=_synchronous(engine)))
    with synchronous.begin() as connection:
        broker.publish_sync(1, "q", connection=connection)
    synchronous.dispose()
    assert headers_of((await look.rows())[-1])["correlation_id"] == "id-4"


def _synchronous(engine: AsyncEngine) -> str:
    return {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}[engine.dialect.name]


# -- annotations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"), [(AsyncConnection, "SqlConnection"), (AsyncSession, "SqlSession")]
)
@pytest.mark.parametrize("optional", [False, True])
@on_one
async def test_a_connection_without_its_annotation_names_it(
    broker: SqlBroker, wrong: Any, right: str, optional: bool
) -> None:
    async def handle(body: Any, connection: Any) -> None: ...

    handle.__annotations__["connection"] = wrong | None if optional else wrong
    broker.subscriber("q", transactional=True, **QUICK)(handle)
    with pytest.raises(FastStreamSetupError, match=f"from faststream_sqlbroker import {right}\n"):
        await broker.start()


@on_one
async def test_annotated_connections_and_dependencies_are_allowed(
    broker: SqlBroker, look: Look
) -> None:
    async def own_session() -> Any:
        yield SimpleNamespace(name="own")

    @broker.subscriber("q", transactional=True, **QUICK)
    async def handle(
        body: Any,
        connection: SqlConnection,
        session: SqlSession,
        another: Annotated[AsyncSession, Depends(own_session, cast=False)],
    ) -> None:
        assert isinstance(connection, AsyncConnection)
        assert isinstance(session, AsyncSession)
        assert another.name == "own"  # type: ignore[attr-defined]

    await broker.start()
    await broker.publish(1, "q")
    [row] = await look.archived()
    assert (row["state"], row["last_error"]) == ("COMPLETED", None)


# -- the command line ------------------------------------------------------------------------------


async def _prepare(url: str) -> None:
    engine = create_async_engine(url)
    await SqlBroker(engine, logger=None).create_tables()
    await engine.dispose()


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb", "mysql"], indirect=True)
async def test_options_of_the_command_line(
    database_url: str, look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from faststream.__main__ import cli

    await _prepare(database_url)
    code = "from faststream import FastStream\nfrom faststream_sqlbroker import SqlBroker\n"
    code += f"app = FastStream(SqlBroker({database_url!r}, logger=None))\n"
    (tmp_path / "command_line_app.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "command_line_app", raising=False)
    arguments = ["publish", "command_line_app:app", '{"a": 1}', "--queue", "q", "--priority", "5"]
    arguments += ["--delay", "0.5s", "--expires-in", "1h", "--key", "k"]
    result = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert result.exit_code == 0, result.output
    [row] = await look.rows()
    assert (row["queue"], row["priority"], row["key"]) == ("q", 5, "k")
    assert (row["next_attempt_at"] - row["created_at"]).total_seconds() == pytest.approx(
        0.5, abs=0.01
    )
    assert (row["expires_at"] - row["created_at"]).total_seconds() == pytest.approx(3600, abs=0.01)
    assert json.loads(bytes(row["payload"])) == {"a": 1}


@pytest.mark.parametrize(
    "option", [{"priority": "5.5"}, {"priority": "500"}, {"delay": "0.5"}, {"expires_in": "-1s"}]
)
@on_one
async def test_text_that_is_not_an_option_is_refused(broker: SqlBroker, option: Any) -> None:
    with pytest.raises(PublishError, match=next(iter(option))):
        await broker.publish(1, "q", **option)


# -- publishers ------------------------------------------------------------------------------------


async def test_a_publisher_asks_for_answers(broker: SqlBroker, look: Look) -> None:
    publisher = broker.publisher("asked", reply_to="replies")
    replies: list[Any] = []

    @broker.subscriber("first", **QUICK)
    @publisher
    async def first(body: Any) -> Any:
        return body

    @broker.subscriber("asked", **QUICK)
    async def asked(body: str) -> str:
        return f"re: {body}"

    @broker.subscriber("replies", "others", **QUICK)
    async def collect(body: str, message: SqlBrokerMessage) -> None:
        replies.append((message.queue, body))

    await broker.start()
    await broker.publish("stacked", "first")
    await publisher.publish("by hand")
    await publisher.publish_batch("batch", "es")
    await publisher.publish("elsewhere", reply_to="others")
    expected = {("replies", f"re: {body}") for body in ("stacked", "by hand", "batch", "es")}
    await eventually(lambda: len(replies) == 5)
    assert set(replies) == expected | {("others", "re: elsewhere")}


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_batch_publisher_sends_returned_messages_one_by_one(
    broker: SqlBroker, look: Look, transactional: bool
) -> None:
    answers: dict[str, Any] = {
        "several": ["a", SqlBrokerResponse("b", priority=4)],
        "none": [],
        "one": "c",
        "with options": SqlBrokerResponse(("d", "e"), key="k"),
    }
    publisher = broker.publisher("out", headers={"from": "here"}, batch=True)

    @broker.subscriber("in", transactional=transactional, **QUICK)
    @publisher
    async def handle(body: str) -> Any:
        return answers[body]

    await broker.start()
    for name in answers:
        await broker.publish(name, "in")
    await eventually(lambda: _ended(look, len(answers)))
    rows = await look.rows()
    found = {bytes(row["payload"]).decode(): (row["priority"], row["key"]) for row in rows}
    assert found == {"a": (0, None), "b": (4, None), "c": (0, None), "d": (0, "k"), "e": (0, "k")}
    assert all(headers_of(row)["from"] == "here" for row in rows)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_the_answers_of_a_batch_publisher_are_written_with_the_ack_or_not_at_all(
    broker: SqlBroker, look: Look
) -> None:
    publisher = broker.publisher("out", batch=True)

    @broker.subscriber("in", retry_strategy=None, **QUICK)
    @publisher
    async def handle(body: str) -> Any:
        return ["a", object()]

    await broker.start()
    await broker.publish("x", "in")
    [row] = await look.archived()
    assert row["state"] == "FAILED"
    assert "cannot be encoded" in row["last_error"]


@on_one
async def test_lists_given_to_publishers_by_hand(broker: SqlBroker, look: Look) -> None:
    publisher = broker.publisher("out", batch=True)
    for refused in (publisher.publish(["a", "b"]), publisher.publish_batch(["a", "b"])):
        with pytest.raises(PublishError, match=r"use publish_batch\(\*messages\)"):
            await refused
    with pytest.raises(PublishError, match=r"got one generator: use publish_batch\(\*messages\)"):
        await broker.publish_batch((n for n in "ab"), queue="q")
    with pytest.raises(PublishError, match=r"got one list of 2: use publish_batch\(\*messages\)"):
        await broker.publish_batch(["a", "b"], queue="out")
    with pytest.raises(PublishError, match=r"got one tuple of 0"):
        await broker.publish_batch((), queue="out")
    assert await look.rows() == []
    await broker.publish_batch(["a", "b"], ["c"], queue="out")
    await broker.publish(["a", "b"], "out")
    await broker.publish_batch(SqlBrokerResponse(["a", "b"]), queue="out")
    assert [json.loads(bytes(row["payload"])) for row in await look.rows()] == [
        ["a", "b"],
        ["c"],
        ["a", "b"],
        ["a", "b"],
    ]


@pytest.mark.parametrize("wrong", [{"reply_to": "r "}, {"reply_to": 5}, {"batch": "yes"}])
def test_wrong_options_of_a_publisher(wrong: dict[str, Any]) -> None:
    broker = SqlBroker("sqlite+aiosqlite:///never-made.db")
    with pytest.raises(SetupError, match=f"a publisher's {next(iter(wrong))} "):
        broker.publisher("q", **wrong)


@on_one
async def test_publishers_of_routes(broker: SqlBroker, look: Look) -> None:
    async def handle(body: Any) -> Any:
        return ["a", "b"]

    route = SqlBrokerRoute(
        handle,
        "in",
        publishers=[SqlBrokerPublisher("out", reply_to="replies", batch=True)],
        **QUICK,
    )
    broker.include_router(SqlBrokerRouter(handlers=[route]))
    await broker.start()
    await broker.publish(1, "in")
    await eventually(lambda: _ended(look, 1))
    rows = await look.rows()
    assert [(bytes(r["payload"]), headers_of(r)["reply_to"]) for r in rows] == [
        (b"a", "replies"),
        (b"b", "replies"),
    ]


# -- ids as text -----------------------------------------------------------------------------------


@on_one
async def test_explain_takes_the_id_that_handlers_have(broker: SqlBroker, look: Look) -> None:
    ids: list[str] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        ids.append(message.message_id)

    await broker.start()
    await broker.publish(1, "q")
    [row] = await look.archived()
    explanation = await broker.admin.explain(ids[0])
    assert (explanation.message_id, explanation.state) == (
        row["id"],
        SqlBrokerMessageState.COMPLETED,
    )


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("own", [True, False], ids=["a URL", "an engine"])
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "not stopped"])
def test_one_asyncio_run_after_another(database_url: str, own: bool, stopped: bool) -> None:
    """The connections of the first are gone with its event loop, and so is what waited for each
    other there."""
    broker = SqlBroker(database_url if own else create_async_engine(database_url), logger=None)

    async def use() -> int:
        await asyncio.gather(*(broker.publish(n, "q") for n in range(20)))
        found = await asyncio.gather(*(broker.pop("q") for _ in range(20)))
        await asyncio.gather(broker.admin.pause("other"), broker.admin.pause("other"))
        if stopped:
            await broker.stop()
        return sum(each is not None for each in found)

    asyncio.run(broker.create_tables())
    assert [asyncio.run(use()) for _ in range(3)] == [20, 20, 20]
    asyncio.run(broker.stop())


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    "options",
    [{}, {"transactional": True}, {"ack_policy": AckPolicy.ACK_FIRST}, {"wakeup": "poll"}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_subscribers_work_in_one_asyncio_run_after_another(
    database_url: str, options: dict[str, Any]
) -> None:
    """The first ends without a stop, in the middle of a handler; its message comes again."""
    broker = SqlBroker(database_url, logger=None, graceful_timeout=60)
    hanging: list[int] = []
    done: list[int] = []

    @broker.subscriber("q", **(QUICK | options))
    async def handle(body: int) -> None:
        if body == 0 and len(hanging) < 2:
            hanging.append(body)
            await asyncio.Event().wait()
        done.append(body)

    @broker.schedule("* * * * * *", queue="q", name="each second")
    async def make() -> int:
        return 2

    async def cut_off(count: int) -> None:
        await broker.start()
        if count == 1:
            await broker.publish(0, "q")
        await eventually(lambda: len(hanging) == count)

    async def work() -> None:
        await broker.start()
        await broker.publish(1, "q")
        await eventually(lambda: 1 in done)
        if options.get("ack_policy") is not AckPolicy.ACK_FIRST:
            await eventually(lambda: 0 in done)
        done.clear()
        await eventually(lambda: 2 in done)
        assert await broker.ping(60.0)

        async def is_alone() -> bool:
            return len(await broker.admin.subscribers()) == 1

        # A sign of life that was under way at the cut may have been written after the new start.
        await eventually(is_alone)
        await broker.stop()

    asyncio.run(broker.create_tables())
    asyncio.run(cut_off(1))
    if options.get("ack_policy") is not AckPolicy.ACK_FIRST:
        asyncio.run(cut_off(2))
    asyncio.run(work())
    assert not broker.subscribers[0].running


def test_a_stop_in_another_asyncio_run_writes_what_the_first_has_left(database_url: str) -> None:
    broker = SqlBroker(database_url, logger=None)
    started = asyncio.Event()

    @broker.subscriber("q", **QUICK)
    async def handle(body: int) -> None:
        started.set()
        await asyncio.Event().wait()

    async def cut_off() -> None:
        await broker.start()
        await broker.publish(0, "q")
        await asyncio.wait_for(started.wait(), 60)

    async def take() -> Any:
        await broker.stop()
        return await broker.pop("q")

    asyncio.run(broker.create_tables())
    asyncio.run(cut_off())
    message = asyncio.run(take())
    assert message is not None
    assert message.attempts_count == 0
    asyncio.run(broker.stop())
