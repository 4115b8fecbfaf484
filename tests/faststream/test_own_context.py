"""What a message sets in context variables is there for what runs for it, and for nothing else."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Annotated, Any

import anyio
import pytest
from faststream import AckPolicy, BaseMiddleware, Depends
from sqlalchemy import text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)

from faststream_sqlbroker import SqlBroker, SqlBrokerMessage, TestSqlBroker
from faststream_sqlbroker.exceptions import NotSupportedError, SetupError
from faststream_sqlbroker.subscriber.pipeline.fingerprints import VARIABLE
from tests.faststream.conftest import QUICK, Look, on_each
from tests.helpers import eventually

tenant: ContextVar[str] = ContextVar("tenant", default="-")
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "timeout": {"handler_timeout": 600.0},
    "batch": {"batch": True, "batch_max_records": 1},
    "transactional": {"transactional": True},
    "ack_first": {"ack_policy": AckPolicy.ACK_FIRST},
    "own task": {"task_per_message": True},
    "own task, batch": {"task_per_message": True, "batch": True, "batch_max_records": 1},
    "own task, transactional": {"task_per_message": True, "transactional": True},
    "own task, timeout": {"task_per_message": True, "handler_timeout": 600.0},
}
Seen = list[tuple[str, str]]
"""Where, and the tenant that is seen there."""


@pytest.fixture(params=["compiled", "generic"], autouse=True)
def pipeline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, request.param)


def only(body: Any) -> Any:
    """The body of a message, or of a batch of one."""
    return body[0] if isinstance(body, list) else body


@on_each(
    "mode, suspends",
    [("transactional", True)],
    [(mode, suspends) for mode in MODES for suspends in (False, True)],
)
async def test_the_next_message_does_not_see_it(
    mode: str, suspends: bool, broker: SqlBroker, look: Look
) -> None:
    seen: list[str] = []

    @broker.subscriber("q", **QUICK, **MODES[mode], max_workers=1)
    async def handle(body: Any) -> None:
        seen.append(tenant.get())
        tenant.set(only(body))
        if suspends:
            await asyncio.sleep(0)
            await asyncio.wait_for(asyncio.sleep(0), 60)
        assert tenant.get() == only(body)
        tenant.set("at the end")

    await broker.publish_batch("a", "b", "c", queue="q")
    await broker.start()
    rows = await look.archived(3)
    assert seen == ["-"] * 3
    assert {row["state"] for row in rows} == {"COMPLETED"}


class Tenant(BaseMiddleware):
    """Sets it, and looks at what is there at each moment."""

    seen: Seen

    async def on_receive(self) -> None:
        self.seen.append(("on_receive", tenant.get()))
        await super().on_receive()

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        tenant.set(f"of {only(await msg.decode())}")
        result = await call_next(msg)
        self.seen.append(("consume_scope", tenant.get()))
        return result

    async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
        self.seen.append(("publish_scope", tenant.get()))
        return await call_next(cmd)

    async def after_processed(self, *info: Any) -> bool | None:
        self.seen.append(("after_processed", tenant.get()))
        return await super().after_processed(*info)


@pytest.fixture
def seen() -> Seen:
    return []


@pytest.fixture
def watched(seen: Seen) -> Any:
    return type("Watched", (Tenant,), {"seen": seen})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_all_that_runs_for_a_message_sees_it(
    mode: str, broker: SqlBroker, look: Look, seen: Seen, watched: Any
) -> None:
    async def opened() -> AsyncIterator[int]:
        seen.append(("opened", tenant.get()))
        await asyncio.sleep(0)
        yield 1
        seen.append(("closed", tenant.get()))

    async def left() -> None:
        seen.append(("task", tenant.get()))

    @broker.subscriber("q", **QUICK, **MODES[mode])
    @broker.publisher("out")
    async def handle(body: Any, one: Annotated[int, Depends(opened)]) -> str:
        seen.append(("handler", tenant.get()))
        await asyncio.create_task(left())
        await asyncio.to_thread(lambda: seen.append(("thread", tenant.get())))
        async with asyncio.TaskGroup() as group:
            group.create_task(left())
        with anyio.fail_after(60):
            await anyio.sleep(0)
        seen.append(("handler ends", tenant.get()))
        tenant.set(f"{tenant.get()}, handled")
        return "answer"

    broker.add_middleware(watched)
    await broker.start()
    for body in ("a", "b"):
        last = ("after_processed", f"of {body}, handled")
        await broker.publish(body, "q")
        await eventually(lambda last=last: last in seen)
    of_message = [each for each in seen if each != ("publish_scope", "-")]
    assert of_message == [
        step
        for body in ("a", "b")
        for step in (
            ("on_receive", "-"),
            ("opened", f"of {body}"),
            ("handler", f"of {body}"),
            ("task", f"of {body}"),
            ("thread", f"of {body}"),
            ("task", f"of {body}"),
            ("handler ends", f"of {body}"),
            ("closed", f"of {body}, handled"),
            ("consume_scope", f"of {body}, handled"),
            ("publish_scope", f"of {body}, handled"),
            ("after_processed", f"of {body}, handled"),
        )
    ]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_synchronous_handler_sees_its_own_messages(
    broker: SqlBroker, look: Look, seen: Seen, watched: Any
) -> None:
    threads: list[bool] = []

    @broker.subscriber("q", **QUICK, max_workers=1)
    def handle(body: str) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        seen.append(("handler", tenant.get()))
        tenant.set("of a thread")

    broker.add_middleware(watched)
    await broker.start()
    await broker.publish("a", "q")
    await look.archived(1)
    await broker.publish("b", "q")
    await look.archived(2)
    assert [each for each in seen if each[0] != "publish_scope"] == [
        (place, value)
        for body in ("a", "b")
        for place, value in (
            ("on_receive", "-"),
            ("handler", f"of {body}"),
            ("consume_scope", f"of {body}"),
            ("after_processed", f"of {body}"),
        )
    ]
    assert threads == [False, False]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_message_that_fails_leaves_nothing(broker: SqlBroker, look: Look) -> None:
    seen: list[str] = []

    @broker.subscriber("q", **QUICK, max_workers=1, retry_strategy=None)
    async def handle(body: str) -> None:
        seen.append(tenant.get())
        tenant.set(body)
        if body == "later":
            await asyncio.sleep(0)
        raise ValueError(body)

    await broker.publish_batch("at once", "later", "at once", queue="q")
    await broker.start()
    rows = await look.archived(3)
    assert seen == ["-"] * 3
    assert [row["last_error"].partition("\n")[0] for row in rows] == [
        "ValueError: at once",
        "ValueError: later",
        "ValueError: at once",
    ]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_was_set_before_the_start_is_seen(broker: SqlBroker, look: Look) -> None:
    seen: list[str] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: str) -> None:
        seen.append(tenant.get())

    token = tenant.set("the application's")
    await broker.start()
    tenant.reset(token)
    await broker.publish("a", "q")
    await look.archived(1)
    assert seen == ["the application's"]


async def test_under_test_the_same_holds() -> None:
    seen: list[str] = []
    broker = SqlBroker("sqlite+aiosqlite:///unused.db", logger=None)

    @broker.subscriber("q", task_per_message=True)
    @broker.subscriber("other")
    async def handle(body: str) -> None:
        seen.append(tenant.get())
        tenant.set(body)

    async with TestSqlBroker(broker) as br:
        for queue in ("q", "other"):
            await br.publish("a", queue)
            await br.publish("b", queue)
    assert seen == ["-"] * 4
    assert tenant.get() == "-"


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.startswith("own task")])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_each_message_may_have_a_task(mode: str, broker: SqlBroker, look: Look) -> None:
    tasks: list[Any] = []

    @broker.subscriber("q", **QUICK, **MODES[mode], max_workers=1)
    async def handle(body: Any) -> None:
        tasks.append(asyncio.current_task())
        # Before there is FastStream's message, and without it, the task tells whose ack it is.
        await broker.publish(only(body), "out", with_ack=True)

    await broker.publish_batch(1, 2, queue="q")
    await broker.start()

    async def handled() -> bool:
        return len(await look.rows(archive=True)) == 2

    await eventually(handled)
    assert len(set(tasks)) == 2
    assert [row["payload"] for row in await look.rows()] == [b"1", b"2"]


@pytest.mark.parametrize("mode", ["plain", "own task"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_timeout_ends_the_handler(mode: str, broker: SqlBroker, look: Look) -> None:
    ended: list[str] = []

    @broker.subscriber(
        "q", **QUICK, **MODES[mode], handler_timeout=0.05, retry_strategy=None, max_workers=1
    )
    async def handle(body: str) -> None:
        try:
            if body == "slow":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(body)
            raise

    await broker.publish_batch("slow", "quick", queue="q")
    await broker.start()
    rows = await look.archived(2)
    states = {row["payload"]: (row["state"], row["reason"]) for row in rows}
    assert states[b"slow"][0] == "FAILED"
    assert ended[:1] == ["slow"]


@pytest.mark.parametrize("mode", ["plain", "own task"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_stop_cancels_a_handler_that_goes_on(
    mode: str, engine: AsyncEngine, logger: logging.Logger, look: Look
) -> None:
    broker = SqlBroker(engine, logger=logger, graceful_timeout=0.01)
    await broker.create_tables()
    began = asyncio.Event()
    ended: list[str] = []

    @broker.subscriber("q", **QUICK, **MODES[mode])
    async def handle(body: str) -> None:
        tenant.set("set")
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(tenant.get())

    await broker.publish("a", "q")
    await broker.start()
    await asyncio.wait_for(began.wait(), 60)
    await broker.stop()
    assert ended == ["set"]
    assert [(row["state"], row["attempts_count"]) for row in await look.rows()] == [("PENDING", 0)]


@pytest.mark.parametrize(
    ("scope", "options"),
    [("message", {}), ("message", {"transactional": True}), ("task", {"task_per_message": True})],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_each_message_has_a_session(
    scope: str, options: dict[str, Any], engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    """As docs/howto/transactions.md says."""

    def current_message() -> Any:
        return broker.context.get_local("message")

    scopes: dict[str, Any] = {"message": current_message, "task": asyncio.current_task}
    session = async_scoped_session(
        async_sessionmaker(engine, class_=AsyncSession), scopefunc=scopes[scope]
    )

    class RemoveSession(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            try:
                return await call_next(msg)
            finally:
                await session.remove()

    used: list[Any] = []

    @broker.subscriber("q", **QUICK, **options, max_workers=1)
    async def handle(body: int, message: SqlBrokerMessage) -> None:
        used.append(session())
        assert session() is used[-1]
        if not options.get("transactional"):
            assert await session.scalar(text("SELECT 1")) == 1

    broker.add_middleware(RemoveSession)
    await broker.publish_batch(1, 2, 3, queue="q")
    await broker.start()
    rows = await look.archived(3)
    assert {row["state"] for row in rows} == {"COMPLETED"}
    assert len({id(each) for each in used}) == 3
    assert not session.registry.registry


def test_without_a_handler_there_is_no_task() -> None:
    broker = SqlBroker("sqlite+aiosqlite:///unused.db", logger=None)
    with pytest.raises(SetupError, match="task_per_message is for handlers"):
        broker.subscriber("q", forward_to="other", task_per_message=True)
    with pytest.raises(SetupError, match="task_per_message must be"):
        broker.subscriber("q", task_per_message=1)  # type: ignore[arg-type]


async def test_single_messages_have_no_task_of_the_brokers() -> None:
    broker = SqlBroker("sqlite+aiosqlite:///unused.db", logger=None)
    subscriber = broker.subscriber("q", task_per_message=True)
    with pytest.raises(NotSupportedError, match="task_per_message"):
        await subscriber.get_one(timeout=0)
