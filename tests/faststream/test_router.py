"""Routers: prefixes, routes, and policies of their own."""

from typing import Any

import pytest
from faststream import AckPolicy
from faststream.exceptions import IncorrectState

from faststream_sqlbroker import SqlBroker, SqlBrokerPublisher, SqlBrokerRoute, SqlBrokerRouter
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_the_prefix_is_for_both_sides(broker: SqlBroker, look: Look) -> None:
    got: list[str] = []
    router = SqlBrokerRouter(prefix="inner.")
    outer = SqlBrokerRouter(prefix="outer.")

    @router.subscriber("in", **QUICK)
    @router.publisher("out")
    async def handle(body: str) -> str:
        got.append(body)
        return body + "!"

    outer.include_router(router)
    broker.include_router(outer, prefix="app.")
    await broker.start()
    await broker.publish("other", "in")
    await broker.publish("x", "app.outer.inner.in")

    async def published() -> list[dict[str, Any]]:
        return [row for row in await look.rows() if row["queue"] == "app.outer.inner.out"]

    [row] = await eventually(published)
    assert bytes(row["payload"]) == b"x!"
    assert got == ["x"]


async def test_routes_of_a_router_subscribe(broker: SqlBroker, look: Look) -> None:
    got: list[str] = []

    async def handle(body: str) -> str:
        return body + "!"

    async def after(body: str) -> None:
        got.append(body)

    router = SqlBrokerRouter(
        "p.",
        [
            SqlBrokerRoute(handle, "in", publishers=[SqlBrokerPublisher("out")], **QUICK),
            SqlBrokerRoute(after, ["out", "more"], **QUICK),
        ],
    )
    broker.include_router(router)
    await broker.start()
    await broker.publish("x", "p.in")
    await broker.publish("y", "p.more")
    await look.archived(3)
    assert sorted(got) == ["x!", "y"]


async def test_the_routers_policy(broker: SqlBroker, look: Look) -> None:
    router = SqlBrokerRouter(ack_policy=AckPolicy.REJECT_ON_ERROR)

    @router.subscriber("q", **QUICK)
    async def handle(body: Any) -> None:
        raise ValueError("boom")

    broker.include_router(router)
    await broker.start()
    await broker.publish("x", "q")
    assert (await look.archived())[0]["state"] == "FAILED"


async def test_a_router_publishes_after_it_was_included(broker: SqlBroker, look: Look) -> None:
    router = SqlBrokerRouter(prefix="p.")
    publisher = router.publisher("out")
    broker.include_router(router)
    await broker.start()
    await publisher.publish("x")
    assert (await look.in_state("PENDING"))["queue"] == "p.out"


async def test_a_router_of_its_own_has_no_database() -> None:
    router = SqlBrokerRouter()
    for name in ("store", "wakeups"):
        with pytest.raises(IncorrectState, match="include_router"):
            getattr(router.config, name)
