"""The FastAPI router under TestSqlBroker: no database is contacted."""

from contextlib import asynccontextmanager
from typing import Annotated, Any
from unittest.mock import Mock

import pytest
from fastapi import Depends, FastAPI, Header
from fastapi.exceptions import RequestValidationError
from faststream import Context as PlainContext
from faststream import Depends as PlainDepends
from faststream.exceptions import SetupError

from faststream_sqlbroker import SqlBrokerRouter as PlainRouter
from faststream_sqlbroker.fastapi import Context, SqlBrokerRouter
from faststream_sqlbroker.testing import TestSqlBroker

UNREACHABLE = "postgresql+asyncpg://ann@192.0.2.1/never"


@pytest.fixture
def router() -> SqlBrokerRouter:
    return SqlBrokerRouter(UNREACHABLE, logger=None)


async def test_mocks_of_handler_and_publisher(router: SqlBrokerRouter) -> None:
    publisher = router.publisher("out")

    @publisher
    @router.subscriber("in")
    async def handle() -> str:
        return "answer"

    async with TestSqlBroker(router.broker) as broker:
        await broker.publish("hello", "in")
        handle.mock.assert_called_once_with("hello")
        publisher.mock.assert_called_once_with("answer")


async def test_fastapis_refusal_is_raised(router: SqlBrokerRouter) -> None:
    @router.subscriber("in")
    async def handle(number: int) -> None: ...

    async with TestSqlBroker(router.broker) as broker:
        with pytest.raises(RequestValidationError):
            await broker.publish("x", "in")


async def test_dependencies_headers_and_included_routers(router: SqlBrokerRouter) -> None:
    ended = Mock()
    plain = PlainRouter()

    def dependency(a: str) -> Any:
        yield a + "!"
        ended()

    @plain.subscriber("in")
    async def handle(
        a: str, both: Annotated[str, Depends(dependency)], word: Annotated[str, Header()]
    ) -> None:
        ended.assert_not_called()
        assert (a, both, word) == ("hi", "hi!", "w")

    router.include_router(plain)
    async with TestSqlBroker(router.broker) as broker:
        await broker.publish({"a": "hi"}, "in", headers={"word": "w"})
        handle.mock.assert_called_once()
    ended.assert_called_once()


async def test_the_lifespan_of_an_application(router: SqlBrokerRouter) -> None:
    called: list[str] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> Any:
        called.append("begin")
        yield {"mine": True}
        called.append("end")

    own = SqlBrokerRouter(UNREACHABLE, logger=None, lifespan=lifespan)
    own.after_startup(lambda _app: called.append("started"))
    own.on_broker_shutdown(lambda _app: called.append("stopping"))
    app = FastAPI()
    app.include_router(own)
    async with TestSqlBroker(own.broker) as broker, app.router.lifespan_context(app) as state:
        assert (state["broker"], state["mine"]) == (broker, True)
    assert called == ["begin", "started", "stopping", "end"]


async def test_state_without_the_broker() -> None:
    own = SqlBrokerRouter(UNREACHABLE, logger=None, setup_state=False)
    app = FastAPI()
    app.include_router(own)
    async with TestSqlBroker(own.broker), app.router.lifespan_context(app) as state:
        assert not state


@pytest.mark.parametrize(
    "allowed",
    [
        Annotated[Any, PlainDepends(lambda: 1), Depends(lambda: 1)],
        Annotated[Any, Context("message.headers"), PlainContext("message.headers")],
        Annotated[
            Annotated[Any, PlainContext("message.headers")],
            Context("message.headers"),
        ],
    ],
)
async def test_annotations_for_both_are_allowed(router: SqlBrokerRouter, allowed: Any) -> None:
    @router.subscriber("in")
    async def handle(value: allowed) -> None: ...

    async with TestSqlBroker(router.broker) as broker:
        await broker.publish({}, "in")


@pytest.mark.parametrize("wrong", [PlainDepends(lambda: 1), PlainContext()])
@pytest.mark.parametrize("annotated", [True, False])
async def test_what_is_faststreams_is_refused(
    router: SqlBrokerRouter, wrong: Any, annotated: bool
) -> None:
    if annotated:

        @router.subscriber("in")
        async def handle(value: Annotated[Any, wrong]) -> None: ...
    else:

        @router.subscriber("in")
        async def other(value: Any = wrong) -> None: ...

    with pytest.raises(SetupError, match="Incorrect `faststream"):
        async with TestSqlBroker(router.broker):
            pass
