"""The FastAPI router: endpoints and handlers of one application on real tables."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, get_type_hints

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Header
from faststream import Context as PlainContext
from faststream import Depends as PlainDepends
from faststream import Response
from pydantic import BaseModel
from sqlalchemy import String, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker import SqlBrokerRouter as PlainRouter
from faststream_sqlbroker.fastapi import (
    BrokerOptions,
    Context,
    RouterOptions,
    SqlBrokerMessage,
    SqlBrokerRouter,
    SqlSession,
    StreamMessage,
    shared_session,
)
from tests.faststream.conftest import QUICK, Look
from tests.faststream.test_declarations import offered
from tests.forked import finished
from tests.helpers import eventually

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


class Order(BaseModel):
    """A body."""

    number: int


@pytest.fixture
async def router(engine: AsyncEngine) -> SqlBrokerRouter:
    await SqlBroker(engine, logger=None).create_tables()
    return SqlBrokerRouter(engine, logger=None)


@asynccontextmanager
async def served(router: APIRouter) -> AsyncIterator[httpx.AsyncClient]:
    """The router in a running application."""
    app = FastAPI(title="Shop")
    app.include_router(router)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client,
    ):
        yield client


@on_sqlite
async def test_a_handler_has_fastapis_parameters(router: SqlBrokerRouter, look: Look) -> None:
    got: list[Any] = []

    def doubled(number: int) -> int:
        return number * 2

    def note(value: Any) -> None:
        got.append(value)

    @router.subscriber("orders", **QUICK)
    async def handle(
        number: int,
        twice: Annotated[int, Depends(doubled)],
        source: Annotated[str, Header()],
        headers: Annotated[Any, Context("message.headers")],
        message: SqlBrokerMessage,
        request: StreamMessage,
        tasks: BackgroundTasks,
    ) -> None:
        got.append((number, twice, source, headers["source"], message.raw_message.queue))
        got.append(request.scope["app"].title)
        tasks.add_task(note, "after")

    async with served(router):
        await router.broker.publish({"number": 4}, "orders", headers={"source": "shop"})
        await look.archived()
    assert got == [(4, 8, "shop", "shop", "orders"), "Shop", "after"]


@on_sqlite
async def test_one_handler_of_two_queues_and_its_answer(
    router: SqlBrokerRouter, look: Look
) -> None:
    got: list[Any] = []
    publisher = router.publisher("out", headers={"a": "1"})

    @publisher
    @router.subscriber("in", "other", response_model=Order, **QUICK)
    async def handle(order: Order) -> Any:
        return {"number": order.number + 1, "secret": "x"}

    @router.subscriber("out", **QUICK)
    async def after(body: dict[str, Any], message: SqlBrokerMessage) -> None:
        got.append((body, message.headers["a"]))

    async with served(router):
        await router.broker.publish(Order(number=1), "in")
        await router.broker.publish(Order(number=2), "other")
        await look.archived(4)
    assert sorted(body["number"] for body, _ in got) == [2, 3]
    assert all(body.keys() == {"number"} and header == "1" for body, header in got)


@on_sqlite
async def test_a_response_of_faststream_keeps_its_options(
    router: SqlBrokerRouter, look: Look
) -> None:
    @router.subscriber("in", **QUICK)
    async def handle(body: str) -> Response:
        return Response(body + "!", headers={"x": "1"})

    async with served(router):
        await router.broker.publish("hi", "in", reply_to="answers")
        [row] = await eventually(lambda: _rows_of(look, "answers"))
    assert bytes(row["payload"]) == b"hi!"
    assert row["headers"]["x"] == "1"


async def _rows_of(look: Look, queue: str) -> list[dict[str, Any]]:
    return [row for row in await look.rows() if row["queue"] == queue]


@on_sqlite
@pytest.mark.parametrize("batch", [False, True])
async def test_a_body_that_does_not_fit_is_failed_at_once(
    router: SqlBrokerRouter, look: Look, batch: bool
) -> None:
    """One of a batch keeps none of the others from its handler."""
    got: list[int] = []
    kind = list[Order] if batch else Order

    @router.subscriber("orders", batch=batch, **QUICK)
    async def handle(orders: kind) -> None:  # type: ignore[valid-type]
        got.extend(order.number for order in (orders if batch else [orders]))

    bodies = [{"number": 1}, {"number": "x"}, {"number": 3}]
    await router.broker.publish_batch(*bodies, queue="orders")
    async with served(router):
        rows = await look.archived(3)
    assert [(row["state"], row["reason"]) for row in rows] == [
        ("COMPLETED", None),
        ("FAILED", "invalid_body"),
        ("COMPLETED", None),
    ]
    assert sorted(got) == [1, 3]


@on_sqlite
async def test_the_handlers_own_refusal_is_tried_again(router: SqlBrokerRouter, look: Look) -> None:
    """A required header is no part of the body; nor is what the handler itself raises."""
    from fastapi.exceptions import RequestValidationError

    @router.subscriber("headers", **QUICK)
    async def needs(body: str, source: Annotated[str, Header()]) -> None: ...

    @router.subscriber("own", **QUICK)
    async def refuses(body: str) -> None:
        raise RequestValidationError([{"loc": ("body", "x")}], body={})

    async with served(router):
        await router.broker.publish("x", "headers")
        await router.broker.publish("x", "own")

        async def tried() -> bool:
            return [row["state"] for row in await look.rows()] == ["RETRYABLE"] * 2

        await eventually(tried)


@on_sqlite
async def test_dependencies_of_the_router_and_their_replacement(
    router: SqlBrokerRouter, look: Look, engine: AsyncEngine
) -> None:
    called: list[str] = []

    def dependency() -> None:
        called.append("router")

    def own() -> None:
        called.append("own")

    def replacement() -> None:
        called.append("replacement")

    with_one = SqlBrokerRouter(engine, logger=None, dependencies=[Depends(dependency)])

    @with_one.subscriber("q", dependencies=[Depends(own)], **QUICK)
    async def handle(body: str) -> None: ...

    app = FastAPI()
    app.include_router(with_one)
    app.dependency_overrides[own] = replacement
    async with app.router.lifespan_context(app):
        await with_one.broker.publish("x", "q")
        await look.archived()
    assert called == ["router", "replacement"]


@on_sqlite
async def test_plain_routers_and_forwards_may_be_included(
    router: SqlBrokerRouter, look: Look
) -> None:
    got: list[str] = []
    plain = PlainRouter(prefix="p.")

    @plain.subscriber("q", **QUICK)
    async def handle(body: str) -> None:
        got.append(body)

    router.include_router(plain)
    router.subscriber("front", forward_to="p.q", **QUICK)
    async with served(router):
        await router.broker.publish("x", "front")
        await look.archived()
    assert got == ["x"]
    with pytest.raises(TypeError, match="StreamRouter into another StreamRouter"):
        router.include_router(SqlBrokerRouter("sqlite+aiosqlite:///other.db"))


@on_sqlite
async def test_hooks_lifespan_and_state(engine: AsyncEngine, router: SqlBrokerRouter) -> None:
    called: list[str] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        called.append("begin")
        yield {"mine": 1}
        called.append("end")

    own = SqlBrokerRouter(engine, logger=None, lifespan=lifespan)

    @own.after_startup
    async def started(_app: FastAPI) -> None:
        called.append(f"started {await own.broker.ping(60.0)}")

    @own.on_broker_shutdown
    def stopping(_app: FastAPI) -> None:
        called.append("stopping")

    app = FastAPI()
    app.include_router(own)
    async with app.router.lifespan_context(app) as state:
        assert state["broker"] is own.broker
        assert state["mine"] == 1
        assert own.broker.running
    assert not own.broker.running
    assert called == ["begin", "started True", "stopping", "end"]


@on_sqlite
async def test_the_document_is_served(router: SqlBrokerRouter) -> None:
    @router.subscriber("orders")
    async def handle(order: Order, source: Annotated[str, Header()]) -> None: ...

    async with served(router) as client:
        document = (await client.get("/asyncapi.json")).json()
        page = await client.get("/asyncapi")
        yaml = await client.get("/asyncapi.yaml")
    assert list(document["channels"]) == ["orders:Handle"]
    assert "Order" in document["components"]["schemas"]
    assert document["info"]["title"] == "Shop"
    assert page.status_code == yaml.status_code == 200
    assert "orders:Handle" in page.text


@on_sqlite
@pytest.mark.parametrize(
    "wrong", [Annotated[Any, PlainContext()], Annotated[Any, PlainDepends(lambda: 1)]]
)
async def test_what_is_faststreams_is_refused(router: SqlBrokerRouter, wrong: Any) -> None:
    """FastAPI would take it for a part of the body."""

    @router.subscriber("q")
    async def handle(body: str, other: wrong) -> None: ...

    with pytest.raises(Exception, match="Incorrect `faststream"):
        async with served(router):
            pass


@on_sqlite
async def test_a_session_needs_a_transaction(router: SqlBrokerRouter) -> None:
    @router.subscriber("q")
    async def handle(body: str, session: SqlSession) -> None: ...

    with pytest.raises(SetupError, match="add transactional=True"):
        async with served(router):
            pass


class Base(DeclarativeBase):
    """The application's tables."""


class Sale(Base):
    """What the endpoint stores, and the handler completes."""

    __tablename__ = "sale"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(String(20))


async def test_one_session_for_endpoint_publish_and_handler(
    router: SqlBrokerRouter, engine: AsyncEngine, look: Look
) -> None:
    """A row and its message are committed together; so are the handler's change and its ack."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    make = async_sessionmaker(engine, expire_on_commit=False)
    Session = Annotated[AsyncSession, shared_session(make)]

    class Sales:
        """A service that both sides use."""

        def __init__(self, session: Session) -> None:
            self.session = session

        async def put(self, number: int, state: str) -> None:
            await self.session.merge(Sale(id=number, state=state))

    failures = ["the first attempt"]
    looked_at = asyncio.Event()

    @router.post("/sales/{number}")
    async def sell(number: int, sales: Annotated[Sales, Depends(Sales)], session: Session) -> None:
        assert sales.session is session
        await sales.put(number, "new")
        await router.broker.publish(number, "sales", session=session)
        if number == 13:
            raise ValueError("no")

    @router.subscriber("sales", transactional=True, **QUICK)
    async def confirm(
        number: int, sales: Annotated[Sales, Depends(Sales)], own: SqlSession
    ) -> None:
        assert sales.session is own
        if not failures:
            await looked_at.wait()
        await sales.put(number, "confirmed")
        await own.flush()
        if failures:
            failures.pop()
            raise ValueError("rolled back")

    async def states() -> dict[int, str]:
        async with make() as session:
            rows = await session.execute(select(Sale.id, Sale.state))
            return {row.id: row.state for row in rows}

    async with served(router) as client:
        with pytest.raises(ValueError, match="no"):
            await client.post("/sales/13")
        assert (await states(), await look.rows()) == ({}, []), "of the failed request"
        assert (await client.post("/sales/1")).status_code == 200
        await eventually(lambda: not failures)
        assert await states() == {1: "new"}, "the failed attempt changed nothing"
        looked_at.set()
        rows = await look.archived()
        assert await states() == {1: "confirmed"}
    assert [row["attempts_count"] for row in rows] == [2]
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(look.tables.archive)) == 1


@on_sqlite
async def test_a_commit_that_fails_is_the_requests_failure(
    router: SqlBrokerRouter, engine: AsyncEngine, look: Look
) -> None:
    """The response is sent after the COMMIT."""

    make = async_sessionmaker(engine)

    @asynccontextmanager
    async def failing() -> AsyncIterator[AsyncSession]:
        async with make() as session:
            yield session
            raise ConnectionError("no answer to the COMMIT")

    @router.post("/")
    async def endpoint(session: Annotated[AsyncSession, shared_session(failing)]) -> None: ...

    async with served(router) as client:
        with pytest.raises(ConnectionError):
            await client.post("/")


def test_the_options_are_those_of_the_broker() -> None:
    """The two declarations cannot drift apart."""
    own = set(BrokerOptions.__annotations__)
    not_here = {"engine", "routers", "apply_types", "provider", "dependencies", "tags"}
    assert own == offered(SqlBroker) - not_here
    fastapis = {
        "prefix",
        "tags",
        "dependencies",
        "default_response_class",
        "responses",
        "callbacks",
        "routes",
        "redirect_slashes",
        "default",
        "dependency_overrides_provider",
        "route_class",
        "on_startup",
        "on_shutdown",
        "lifespan",
        "deprecated",
        "include_in_schema",
        "generate_unique_id_function",
    }
    [stream_router] = SqlBrokerRouter.__bases__[:1]
    added = {"setup_state", "specification", "specification_tags", "schema_url"}
    assert set(RouterOptions.__annotations__) == own | fastapis | added
    assert fastapis | added | {"context", "middlewares"} == offered(stream_router) - {"self"}
    assert get_type_hints(SqlBrokerRouter.subscriber)


def test_a_missing_fastapi_names_the_extra() -> None:
    code = """
import sys
sys.modules["fastapi"] = None
from faststream_sqlbroker import MissingExtraError
try:
    import faststream_sqlbroker.fastapi
except MissingExtraError as error:
    print(error)
"""
    done = finished("-c", code)
    assert "pip install 'sqlbroker[fastapi]'" in done.stdout
