"""Messages that go round by forward_to end; DESTINATION uses only the destinations it is given."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    DESTINATION,
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerRouter,
    Step,
)
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.flow.fleet import heartbeat as destinations_module
from faststream_sqlbroker.flow.fleet.heartbeat import Destinations
from tests.faststream.conftest import QUICK, Heard, Look
from tests.faststream.test_forward import OPAQUE, URL, all_in
from tests.helpers import eventually

pytestmark = pytest.mark.capability(
    "`forward_to`: no message goes round for ever, allowed destinations"
)
UNKNOWN = "no live subscriber has this queue"


@pytest.fixture
async def watchful(
    engine: AsyncEngine, broker: SqlBroker, logger: logging.Logger
) -> AsyncIterator[SqlBroker]:
    """A broker that looks often who lives; `broker` has made the tables."""
    made = SqlBroker(engine, logger=logger, graceful_timeout=1.0, presence_interval=0.2)
    yield made
    await made.stop()


async def put(broker: SqlBroker, queue: str, headers: Any = None, hops: int = 0) -> int:
    """Insert as another program does, with the hops of a message that was moved so often."""
    [message_id] = await broker.config.store.insert(
        [NewMessage(queue, OPAQUE, json.dumps(headers))]
    )
    assert message_id is not None
    async with broker.engine.begin() as connection:
        await connection.execute(text(f"UPDATE message SET hops = {hops} WHERE id = {message_id}"))
    return message_id


def headers_of(row: dict[str, Any]) -> Any:
    return row["headers"] if isinstance(row["headers"], dict) else json.loads(row["headers"])


# -- hops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", ["forward_to", "DESTINATION"])
async def test_a_message_in_a_loop_ends(
    broker: SqlBroker, look: Look, heard: Heard, back: str
) -> None:
    """After 32 hops, by either; nothing of it is lost."""
    broker.subscriber("a", **QUICK, forward_to="b")
    broker.subscriber("b", **QUICK, forward_to="a" if back == "forward_to" else DESTINATION)
    message_id = await put(broker, "a", {"destination": "a", "publish_after": 0})
    await broker.start()
    [row] = await look.archived()
    assert (row["id"], row["state"], row["reason"]) == (message_id, "FAILED", "too_many_hops")
    assert (row["queue"], row["hops"], row["publish_count"], bytes(row["payload"])) == (
        "a",
        32,
        1,
        OPAQUE,
    )
    [said] = heard.texts("too_many_hops", logging.ERROR)
    assert f"message {message_id} of queue 'a': it is rejected (too_many_hops)" in said


async def test_a_message_in_a_loop_is_a_dead_letter_if_there_is_a_queue(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """It keeps its count: another way round through the dead letter queue ends, too."""
    broker.subscriber("a", **QUICK, forward_to="b", dead_letter_queue="dead")
    broker.subscriber("dead", **QUICK, forward_to="a")
    await put(broker, "a", hops=32)
    await broker.start()
    [row] = await look.archived()
    assert (row["queue"], row["reason"], row["hops"]) == ("dead", "too_many_hops", 32)
    assert headers_of(row)["dead-letter"]["reason"] == "too_many_hops"
    assert heard.texts("it goes to the dead letter queue 'dead' (too_many_hops)", logging.ERROR)


async def test_32_hops_are_allowed(broker: SqlBroker, look: Look) -> None:
    broker.subscriber("a", **QUICK, forward_to="b")
    await put(broker, "a", hops=31)
    await broker.start()
    [row] = await all_in(look, "b", 1)
    assert row["hops"] == 32


@pytest.mark.parametrize("how", ["move_to", "republish"])
async def test_a_move_by_a_handler_resets_the_hops(broker: SqlBroker, look: Look, how: str) -> None:
    broker.subscriber("a", "c", **QUICK, forward_to="b")

    @broker.subscriber("b", **QUICK)
    async def handle(message: SqlBrokerMessage) -> None:
        if (message.raw_message.hops, message.publish_count) == (32, 1):  # type: ignore[union-attr]
            await getattr(message, how)("c")

    await put(broker, "a", hops=31)
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["hops"]) == ("COMPLETED", 1)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_message_that_stays_keeps_its_hops(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("b", **QUICK)
    async def handle(message: SqlBrokerMessage) -> None:
        if message.raw_message.attempts_count == 0:  # type: ignore[union-attr]
            await message.nack(delay=0)

    await put(broker, "b", hops=5)
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"], row["hops"]) == ("COMPLETED", 2, 5)


def test_a_pipeline_has_no_more_steps_than_hops() -> None:
    steps = [Step(f"s{n}") for n in range(33)]
    with pytest.raises(SetupError, match=r"has 33 steps, but a message can move at most 32 times"):
        SqlBroker(URL, logger=None).pipeline("long", *steps, forward_to="end")
    SqlBroker(URL, logger=None).pipeline("long", *steps[1:], forward_to="end")


# -- destinations ----------------------------------------------------------------------------------


async def test_only_the_destinations_that_are_given(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION, destinations=["x", "y", "x"])
    for name in ("x", "z", "y"):
        await put(broker, "front", {"destination": name, "publish_after": 0})
    await broker.start()

    async def moved() -> list[str]:
        found = sorted(row["queue"] for row in await look.rows())
        return found if found == ["x", "y"] else []

    await eventually(moved)
    [row] = await look.rows(archive=True)
    assert (row["state"], row["reason"], row["queue"]) == (
        "FAILED",
        "destination_not_allowed",
        "front",
    )
    assert "'z'" in row["last_error"]
    assert heard.texts("destination_not_allowed", logging.ERROR)


async def test_other_destinations_are_dead_letters_if_there_is_a_queue(
    broker: SqlBroker, look: Look
) -> None:
    options = {"forward_to": DESTINATION, "destinations": ("x",), "dead_letter_queue": "dead"}
    broker.subscriber("front", **QUICK, **options)
    await put(broker, "front", {"destination": "z"})
    await broker.start()
    [row] = await all_in(look, "dead", 1)
    assert headers_of(row)["dead-letter"]["reason"] == "destination_not_allowed"
    assert headers_of(row)["destination"] == "z"


async def test_names_are_full_names(broker: SqlBroker, look: Look) -> None:
    """As in the header, no router adds its prefix."""
    router = SqlBrokerRouter(prefix="shop.")
    router.subscriber("front", **QUICK, forward_to=DESTINATION, destinations=["shop.x"])
    broker.include_router(router)
    await put(broker, "shop.front", {"destination": "shop.x"})
    await broker.start()
    await all_in(look, "shop.x", 1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"forward_to": "b", "destinations": ["x"]},
            r"destinations needs forward_to=DESTINATION",
        ),
        ({"destinations": ["x"]}, r"got destinations=\['x'\] and forward_to=None"),
        ({"forward_to": DESTINATION, "destinations": "x"}, r"destinations must be a list of names"),
        ({"forward_to": DESTINATION, "destinations": 5}, r"destinations must be a list of names"),
        ({"forward_to": DESTINATION, "destinations": []}, r"destinations is empty"),
        ({"forward_to": DESTINATION, "destinations": [["x"]]}, r"destinations cannot contain"),
        (
            {"forward_to": DESTINATION, "destinations": [""]},
            r"destinations cannot contain '': it must not be empty",
        ),
        (
            {"forward_to": DESTINATION, "destinations": ["a"]},
            r"destinations contains 'a', a queue of the subscriber",
        ),
    ],
)
def test_impossible_destinations_are_refused(options: Any, problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        SqlBroker(URL, logger=None).subscriber("a", **options)


# -- unknown queue names ---------------------------------------------------------------------------


async def test_an_unknown_queue_name_is_warned_of_once(
    watchful: SqlBroker, look: Look, heard: Heard
) -> None:
    watchful.subscriber("front", **QUICK, forward_to=DESTINATION)

    @watchful.subscriber("x", **QUICK)
    async def handle(message: SqlBrokerMessage) -> None: ...

    await watchful.start()
    ids = [
        await put(watchful, "front", {"destination": name, "publish_after": 0})
        for name in ("x", "tpyo", "tpyo")
    ]
    [said] = await eventually(lambda: heard.texts(UNKNOWN, logging.WARNING))
    assert f"message {ids[1]} of queue 'front' named the destination 'tpyo'" in said
    await put(watchful, "front", {"destination": "tpyo", "publish_after": 0})
    await put(watchful, "front", {"destination": "other", "publish_after": 0})
    await eventually(lambda: any("'other'" in one for one in heard.texts(UNKNOWN)))
    assert len(heard.texts(UNKNOWN)) == 2


async def test_names_that_are_given_are_known(
    watchful: SqlBroker, look: Look, heard: Heard
) -> None:
    watchful.subscriber("front", **QUICK, forward_to=DESTINATION, destinations=["later"])
    watchful.subscriber("back", **QUICK, forward_to=DESTINATION)
    await watchful.start()
    await put(watchful, "front", {"destination": "later", "publish_after": 0})
    await all_in(look, "later", 1)
    await put(watchful, "back", {"destination": "nowhere", "publish_after": 0})
    assert len(await eventually(lambda: heard.texts(UNKNOWN))) == 1


def test_only_so_many_names_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages may name any number."""
    monkeypatch.setattr(destinations_module, "MAX_NAMES", 2)
    told: list[str] = []

    class Row:
        id = 1
        queue = "front"

    names: Any = Destinations(0.0)
    for name in ("a", "b", "c"):
        names.record(name, Row, lambda _level, said, **_more: told.append(said))
    assert names.has_due
    living: Any = [
        type("Live", (LiveSubscriber,), {"queues": ("a",), "__init__": lambda _self: None})()
    ]
    names.compare(living)
    assert [("'b'" in said) for said in told] == [True]
    assert not names.has_due
