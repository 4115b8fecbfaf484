"""What declarations take and refuse at every level; no database is connected."""

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from faststream import Context, Depends, UnderlyingDriverAnnotation
from faststream.exceptions import SetupError as FastStreamSetupError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from faststream_sqlbroker import (
    DESTINATION,
    Move,
    PublishError,
    SetupError,
    SqlBroker,
    SqlBrokerPublisher,
    SqlBrokerResponse,
    SqlBrokerRoute,
    SqlBrokerRouter,
    Step,
)
from tests.helpers import eventually

URL = "sqlite+aiosqlite:///never-opened.db"
REFUSED = {
    "logs.{level}": r"templates such as \{level\} are not supported: name each queue",
    ".": "a URL cannot contain it",
    "..": "a URL cannot contain it",
}
"""What can be no name of a queue, and why."""


def offered(call: Callable[..., Any]) -> set[str]:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    found = inspect.signature(call).parameters.values()
    return {p.name for p in found if p.kind in kinds} - {"self"}


def test_every_level_takes_the_same_options() -> None:
    broker = SqlBroker(URL)
    router = SqlBrokerRouter()
    assert offered(router.publisher) == offered(broker.publisher)
    assert offered(SqlBrokerPublisher) == offered(broker.publisher)
    assert offered(router.subscriber) == offered(broker.subscriber)
    assert offered(SqlBrokerRoute) == offered(broker.subscriber) | {"call", "publishers"}


@pytest.mark.parametrize("persistent", [True, False])
def test_a_route_publisher_may_be_kept_by_its_handler_alone(persistent: bool) -> None:
    async def handle(body: str) -> str:
        return body

    out = SqlBrokerPublisher("out", reply_to="answers", persistent=persistent)
    router = SqlBrokerRouter(handlers=[SqlBrokerRoute(handle, "in", publishers=[out])])
    [publisher] = router.publishers
    assert publisher.config.reply_to == "answers"
    kept = weakref.ref(publisher)
    del publisher
    router._handlers.clear()
    router._subscribers.clear()
    router._Registrator__persistent_subscribers.clear()
    gc.collect()
    assert (kept() is not None) is persistent


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    "declare",
    [
        lambda broker, name: broker.subscriber(name),
        lambda broker, name: broker.subscriber("a", name),
        lambda broker, name: broker.subscriber({name: 2}),
        lambda broker, name: broker.subscriber("a", forward_to=name),
        lambda broker, name: broker.subscriber("a", forward_to=DESTINATION, destinations=[name]),
        lambda broker, name: broker.subscriber("a", dead_letter_queue=name),
        lambda broker, name: broker.publisher(name),
        lambda broker, name: broker.publisher("a", reply_to=name),
        lambda broker, name: broker.pipeline("p", Step(name), forward_to="b"),
        lambda broker, name: broker.pipeline("p", Step("a"), forward_to=name),
        lambda broker, name: broker.publish_on_schedule("s", "* * * * *", name),
        lambda broker, name: broker.publish_on_schedule("s", "* * * * *", "a", destination=name),
        lambda broker, name: broker.publish_on_schedule("s", "* * * * *", "a", reply_to=name),
        lambda _, name: SqlBrokerRouter().subscriber(name),
        lambda _, name: SqlBroker(URL, max_depth={name: 5}),
        lambda _, name: Move(name),
    ],
)
def test_what_can_be_no_queue_is_refused_where_it_is_declared(
    declare: Callable[[SqlBroker, str], Any], name: str
) -> None:
    with pytest.raises(SetupError, match=REFUSED[name]):
        declare(SqlBroker(URL), name)


@pytest.mark.parametrize("name", ["{", "a{}", "{{level}}", "{a b}", "{a-b}", "}a{"])
def test_other_braces_are_characters_of_a_name(name: str) -> None:
    subscriber = SqlBroker(URL).subscriber(name)
    assert subscriber.queues == (name,)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", REFUSED)
async def test_nothing_is_published_to_what_can_be_no_queue(broker: SqlBroker, name: str) -> None:
    for publish in (
        broker.publish("x", name),
        broker.publish("x", "a", destination=name),
        broker.publish("x", "a", reply_to=name),
        broker.publish_batch("x", queue=name),
        broker.publish_batch(SqlBrokerResponse("x", queue=name), queue="a"),
        broker.request("x", name, timeout=1),
    ):
        with pytest.raises(PublishError, match=REFUSED[name]):
            await publish
    message_id = await broker.publish("x", "a")
    with pytest.raises(SetupError, match=REFUSED[name]):
        await broker.admin.move(message_id, name)
    reserved = await broker.reserve("a")
    assert reserved is not None
    with pytest.raises(SetupError, match=REFUSED[name]):
        await reserved.move_to(name)
    await reserved.commit()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_template_in_a_prefix_is_refused_at_the_start(broker: SqlBroker) -> None:
    router = SqlBrokerRouter(prefix="{tenant}.")

    @router.subscriber("a")
    async def handle(body: str) -> None: ...

    broker.include_router(router)
    with pytest.raises(SetupError, match=r"templates such as \{tenant\} are not supported"):
        await broker.start()


class Ledger:
    """A class of the application, such as a client of a service."""


def _wrong(kind: Any) -> Any:
    async def handle(body: str, ledger: kind) -> None: ...

    return handle


def _behind_depends(kind: Any) -> Any:
    def dependency(ledger: kind) -> None: ...

    async def handle(body: str, value: Annotated[Any, Depends(dependency)]) -> None: ...

    return handle


MINE = {Ledger: UnderlyingDriverAnnotation(type_hint=Ledger, module="shop.di", name="TheLedger")}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("on_router", [False, True])
@pytest.mark.parametrize("handler", [_wrong, _behind_depends])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: x | None, lambda x: Annotated[x, "doc"]])
async def test_own_classes_get_an_annotation_to_use(
    engine: AsyncEngine, on_router: bool, handler: Any, wrap: Any
) -> None:
    broker = SqlBroker(engine, logger=None, underlying_driver_annotations={} if on_router else MINE)
    router = SqlBrokerRouter(underlying_driver_annotations=MINE if on_router else None)
    router.subscriber("q")(handler(wrap(Ledger)))
    broker.include_router(router)
    await broker.create_tables()
    with pytest.raises(FastStreamSetupError, match=r"from shop\.di import TheLedger"):
        await broker.start()
    await broker.stop()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_own_annotation_replaces_the_brokers(engine: AsyncEngine) -> None:
    mine = {AsyncConnection: "shop.Connection"}
    broker = SqlBroker(engine, logger=None, underlying_driver_annotations=mine)
    broker.subscriber("q")(_wrong(AsyncConnection))
    await broker.create_tables()
    with pytest.raises(FastStreamSetupError, match=r"annotation instead: `shop\.Connection`"):
        await broker.start()
    await broker.stop()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_context_annotation_of_an_own_class_is_injected(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None, underlying_driver_annotations=MINE)
    ledger = Ledger()
    broker.context.set_global("ledger", ledger)
    got: list[Any] = []

    @broker.subscriber("q")
    async def handle(body: str, found: Annotated[Ledger, Context("ledger")]) -> None:
        got.append(found)

    await broker.create_tables()
    await broker.start()
    await broker.publish("x", "q")
    await eventually(lambda: got == [ledger])
    await broker.stop()
