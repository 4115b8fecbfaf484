"""What may be a handler, where it runs, and that what it returns is awaited."""

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Annotated, Any, Literal, Optional, Union

import anyio
import pytest
from annotated_types import Gt
from fastapi import FastAPI
from faststream import AckPolicy, BaseMiddleware, Depends
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker, SqlBrokerRoute, SqlBrokerRouter, TestSqlBroker
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.fastapi import SqlBrokerRouter as FastAPIRouter
from faststream_sqlbroker.flow.threads import run_in_thread
from faststream_sqlbroker.subscriber.pipeline.fingerprints import VARIABLE
from tests.faststream.conftest import QUICK, Heard, Look, Make, on_each
from tests.helpers import eventually

ONCE: Any = {**QUICK, "retry_strategy": None}


def sync_generator(body: Any) -> Iterator[Any]:
    yield body


async def async_generator(body: Any) -> AsyncIterator[Any]:
    yield body


class Handler:
    def __call__(self, body: Any) -> Iterator[Any]:
        yield body

    async def method(self, body: Any) -> AsyncIterator[Any]:
        yield body


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does not know of async functions."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


GENERATORS = {
    "sync": sync_generator,
    "async": async_generator,
    "partial": functools.partial(functools.partial(sync_generator)),
    "object": Handler(),
    "method": Handler().method,
    "partial object": functools.partial(Handler()),
}


@pytest.fixture
def unused() -> SqlBroker:
    return SqlBroker("sqlite+aiosqlite:///unused.db", logger=None)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_function_is_refused(unused: SqlBroker, name: str) -> None:
    handler = GENERATORS[name]
    refused = pytest.raises(SetupError, match="generator function, whose body would never run: use")
    with refused:
        unused.subscriber("q")(handler)
    with refused:
        unused.subscriber("q")()(handler)
    with refused:
        unused.subscriber("q")(unused.publisher("out")(handler))
    with refused:
        unused.include_router(SqlBrokerRouter(handlers=[SqlBrokerRoute(handler, "q")]))


async def fail(body: Any) -> None:
    await asyncio.sleep(0)
    raise ValueError(f"failed late: {body}")


def coroutine(body: Any) -> Coroutine[Any, Any, None]:
    return fail(body)


def untyped(body: Any):  # type: ignore[no-untyped-def]
    return fail(body)


async def task(body: Any) -> Awaitable[None]:
    return asyncio.ensure_future(fail(body))


async def future(body: Any):  # type: ignore[no-untyped-def]
    future = asyncio.get_running_loop().create_future()
    future.set_exception(ValueError(f"failed late: {body}"))
    return future


class Returning:
    def __call__(self, body: Any) -> Any:
        return fail(body)


FAILING = {
    "coroutine": coroutine,
    "untyped": untyped,
    "task": task,
    "future": future,
    "object": Returning(),
    "partial": functools.partial(untyped),
    "decorated": decorated(fail),
}
PIPELINES = pytest.mark.parametrize("pipeline", ["compiled", "generic"])


@PIPELINES
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_failure_of_what_is_returned_is_the_handlers(
    pipeline: str, broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, pipeline)
    for name, handler in FAILING.items():
        broker.subscriber(name, **ONCE)(handler)
        await broker.publish("x", name)
    await broker.start()
    rows = await look.archived(len(FAILING))
    assert {row["queue"]: row["state"] for row in rows} == dict.fromkeys(FAILING, "FAILED")
    assert all("failed late: x" in row["last_error"] for row in rows)


@PIPELINES
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_result_of_what_is_returned_is_published(
    pipeline: str, broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, pipeline)

    async def double(body: int) -> int:
        return 2 * body

    @broker.subscriber("typed", **ONCE)
    @broker.publisher("out")
    def typed(body: int) -> Coroutine[Any, Any, int]:
        return double(body)

    @broker.subscriber("task", **ONCE)
    @broker.publisher("out")
    async def in_task(body: int) -> "asyncio.Task[int]":
        return asyncio.create_task(double(body))

    got: list[int] = []

    @broker.subscriber("out", **ONCE)
    async def collect(body: int) -> None:
        got.append(body)

    await broker.publish(1, "typed")
    await broker.publish(2, "task")
    await broker.start()
    rows = await look.archived(4)
    assert {row["state"] for row in rows} == {"COMPLETED"}
    assert sorted(got) == [2, 4]


ANNOTATIONS: Any = (
    *(Any, int, float | int, Optional[int], Union[int, str], Literal[2], Annotated[int, Gt(0)]),  # noqa: UP007, UP045
    *(Awaitable, Awaitable[int], Coroutine[Any, Any, int], "Awaitable[int]"),
    *(Optional[Awaitable[int]], Union[int, Awaitable[int]]),  # noqa: UP007, UP045
)


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
async def test_a_result_may_be_annotated_with_or_without_the_awaitable(
    unused: SqlBroker, annotation: Any
) -> None:
    async def double(body: int) -> int:
        return 2 * body

    def handle(body: int):  # type: ignore[no-untyped-def]
        return double(body)

    handle.__annotations__["return"] = annotation
    publisher = unused.publisher("out")
    unused.subscriber("q", retry_strategy=None)(publisher(handle))
    async with TestSqlBroker(unused) as br:
        await br.publish(1, "q")
        assert [message.body for message in br.outbox("out")] == [2]


@PIPELINES
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_decorated_generator_function_fails(
    pipeline: str, broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the call nothing tells it from a decorator that uses up the generator."""
    monkeypatch.setenv(VARIABLE, pipeline)

    def used_up(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return list(function(*args, **kwargs))

        return call

    for queue, decorator in (("never run", decorated), ("used up", used_up)):

        @broker.subscriber(queue, **ONCE)
        @decorator
        def handle(body: Any):  # type: ignore[no-untyped-def]
            yield body

        await broker.publish("x", queue)
    await broker.start()
    rows = await look.archived(2)
    assert {row["queue"]: row["state"] for row in rows} == {
        "never run": "FAILED",
        "used up": "COMPLETED",
    }


@PIPELINES
@pytest.mark.parametrize("mode", ["batch", "ack_first", "untyped"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_other_modes_await_too(
    mode: str, pipeline: str, make: Make, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, pipeline)
    broker = make(apply_types=mode != "untyped")
    await broker.create_tables()
    options = {"batch": {"batch": True}, "ack_first": {"ack_policy": AckPolicy.ACK_FIRST}}
    ran: list[Any] = []

    async def late(body: Any) -> None:
        await asyncio.sleep(0)
        ran.append(body)

    broker.subscriber("decorated", **QUICK, **options.get(mode, {}))(decorated(late))

    @broker.subscriber("task", **QUICK, **options.get(mode, {}))
    async def in_task(body: Any) -> Any:
        return asyncio.create_task(late(body))

    for queue in ("decorated", "task"):
        await broker.publish(queue, queue)
    await broker.start()
    rows = await look.archived(2)
    assert {row["state"] for row in rows} == {"COMPLETED"}
    expected: list[Any] = ["decorated", "task"]
    assert sorted(ran) == ([[body] for body in expected] if mode == "batch" else expected)


async def test_a_direct_call_stays_as_it_was_written(unused: SqlBroker) -> None:
    @unused.subscriber("q")
    def handle(body: int) -> int:
        return body + 1

    assert handle(1) == 2
    async with TestSqlBroker(unused) as br:
        await br.publish(1, "q")
        await handle.assert_called_once_with(1)
        assert handle(1) == 2


class Itself:
    """Such as a pipeline of Redis: to await it gives it again, at once."""

    def __await__(self) -> Generator[Any, Any, "Itself"]:
        yield from ()
        return self


async def test_a_result_that_gives_itself_is_not_awaited_for_ever(unused: SqlBroker) -> None:
    handled: list[str] = []

    @unused.subscriber("q", retry_strategy=None)
    async def handle(body: str):  # type: ignore[no-untyped-def]
        handled.append(body)
        return Itself()

    async with TestSqlBroker(unused) as br:
        await br.publish("x", "q")
    assert handled == ["x"]


@pytest.mark.parametrize("name", FAILING)
async def test_under_test_what_is_returned_is_awaited(unused: SqlBroker, name: str) -> None:
    unused.subscriber("q", retry_strategy=None)(FAILING[name])
    async with TestSqlBroker(unused) as br:
        with pytest.raises(ValueError, match="failed late: x"):
            await br.publish("x", "q")


WORKERS = 60
"""More than anyio's 40 threads."""


class Crowd:
    """Synchronous handlers that wait in their threads until all are there and the test lets go."""

    def __init__(self) -> None:
        self._all_here = threading.Barrier(WORKERS)
        self.here = threading.Event()
        self.end = threading.Event()

    def wait(self) -> None:
        self._all_here.wait(120)
        self.here.set()
        assert self.end.wait(120)

    async def meets(self) -> None:
        """Wait for all, and call a function as FastAPI does for a synchronous endpoint."""
        try:
            await eventually(self.here.is_set)
            assert await asyncio.wait_for(anyio.to_thread.run_sync(lambda: "free"), 120) == "free"
        finally:
            self.end.set()


# FastDepends, which the generic pipeline uses, runs dependencies in anyio's threads.
@on_each(
    "waits, pipeline",
    [("handler", "compiled")],
    [("handler", "generic"), ("dependency", "compiled")],
)
async def test_each_worker_has_a_thread(
    waits: str, pipeline: str, broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, pipeline)
    crowd = Crowd()

    def handle(body: int) -> None:
        crowd.wait()

    async def depends(body: int, waited: Annotated[None, Depends(crowd.wait)]) -> None: ...

    handler: Any = handle if waits == "handler" else depends
    broker.subscriber("q", **ONCE, max_workers=WORKERS)(handler)
    await broker.publish_batch(*range(WORKERS), queue="q")
    await broker.start()
    await crowd.meets()
    assert {row["state"] for row in await look.archived(WORKERS)} == {"COMPLETED"}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_each_worker_of_fastapis_router_has_a_thread(engine: AsyncEngine, look: Look) -> None:
    router = FastAPIRouter(engine, logger=None)
    await router.broker.create_tables()
    crowd = Crowd()

    @router.subscriber("q", **ONCE, max_workers=WORKERS)
    def handle(body: int) -> None:
        crowd.wait()

    app = FastAPI()
    app.include_router(router)
    async with app.router.lifespan_context(app):
        await router.broker.publish_batch(*range(WORKERS), queue="q")
        await crowd.meets()
        assert {row["state"] for row in await look.archived(WORKERS)} == {"COMPLETED"}


async def test_under_test_a_synchronous_handler_may_publish_to_itself(unused: SqlBroker) -> None:
    got: list[int] = []

    @unused.subscriber("q", max_workers=1)
    def handle(body: int) -> None:
        got.append(body)
        if body:
            anyio.from_thread.run(unused.publish, body - 1, "q")

    async with TestSqlBroker(unused) as br:
        await br.publish(2, "q")
    assert got == [2, 1, 0]


async def test_an_abandoned_thread_changes_nothing_later(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """Its message stays leased, also when it ends in the end; then it is delivered again."""
    broker.config.broker_config.graceful_timeout = 0.05
    go_on, ended = threading.Event(), threading.Event()
    calls: list[threading.Thread] = []

    @broker.subscriber("q", **QUICK)
    def handle(body: str) -> str:
        calls.append(threading.current_thread())
        if len(calls) == 1:
            assert go_on.wait(240)
            ended.set()
        return "answer"

    await broker.publish("x", "q", reply_to="answers")
    await broker.start()
    await eventually(lambda: calls)
    await broker.stop()
    held = await look.rows()
    assert [(row["state"], row["deliveries_count"]) for row in held] == [("PROCESSING", 1)]
    [told] = heard.texts("is abandoned", logging.ERROR)
    assert told.startswith("the handler 'handle' is abandoned after")
    assert f"it runs in a thread, which cannot be cancelled; its messages [{held[0]['id']}]" in told
    assert calls[0].daemon
    await broker.start()
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 240)
    assert [row["lease_token"] for row in await look.rows()] == [held[0]["lease_token"]]
    await look.end_leases()
    await eventually(lambda: len(calls) == 2)

    async def answered() -> bool:
        return [row["queue"] for row in await look.rows()] == ["answers"]

    await eventually(answered)
    [row] = await look.rows(archive=True)
    assert (row["state"], row["deliveries_count"]) == ("COMPLETED", 2)


class InOtherTasks(BaseMiddleware):
    """Calls what is inside in a task of its own, as `asyncio.wait_for` did before Python 3.12."""

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        """Call it."""
        return await asyncio.create_task(call_next(msg))


@on_each("where", ["handler"], ["handler in another task", "dependency"])
async def test_what_a_thread_works_on_is_not_given_back(
    broker: SqlBroker, look: Look, heard: Heard, where: str
) -> None:
    """F10: another process would begin it while the thread goes on."""
    broker.config.broker_config.graceful_timeout = 0.05
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert go_on.wait(240)

    if where == "dependency":

        @broker.subscriber("q", **QUICK)
        async def handle(body: str, waited: Annotated[None, Depends(wait)]) -> None:
            """It is not called."""

    else:
        if where == "handler in another task":
            broker.add_middleware(InOtherTasks)
        broker.subscriber("q", **QUICK)(lambda body: wait())

    await broker.publish("x", "q")
    await broker.start()
    await eventually(started.is_set)
    await broker.stop()
    try:
        [row] = await look.rows()
        assert (row["state"], row["deliveries_count"]) == ("PROCESSING", 1)
        assert len(heard.texts("is abandoned", logging.ERROR)) == 1
    finally:
        go_on.set()


async def answer(number: int) -> int:
    return number


def of_anyio() -> tuple[int, int]:
    """What anyio offers in threads."""
    anyio.from_thread.check_cancelled()
    return anyio.from_thread.run(answer, 1), anyio.run(answer, 2)


def test_a_thread_is_as_one_of_anyio() -> None:
    """As FastStream's command line runs applications: by `anyio.run`."""
    assert anyio.run(run_in_thread, of_anyio) == (1, 2)


async def test_a_stop_iteration_ends_the_wait() -> None:
    """No future can have it as its exception."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        await run_in_thread(next, iter(()))


async def test_a_free_thread_takes_the_next_call() -> None:
    first = await run_in_thread(threading.current_thread)
    assert await run_in_thread(threading.current_thread) is first
