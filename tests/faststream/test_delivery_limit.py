"""F6, promise 8: `max_deliveries` limits lost leases, and nothing that has an outcome."""

import logging
from contextlib import aclosing
from typing import Any

import pytest
from sqlalchemy import text

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    Once,
    SqlBroker,
    SqlBrokerMessage,
    SqlConnection,
    TestSqlBroker,
    Throttle,
    VirtualClock,
)
from tests.faststream.conftest import CALM, QUICK, Heard, Look
from tests.faststream.test_reserve import expire
from tests.helpers import eventually

FOREVER = ConstantRetryStrategy(delay_seconds=0)
FEW = ConstantRetryStrategy(delay_seconds=0, max_attempts=3)
SPENT = 19
"""One less than the default limit for a strategy without one."""
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": True},
    "transactional": {"transactional": True},
    "ordered": {"ordered": True},
    "throttled": {"policies": [Throttle(1_000, per="1s")]},
    "once": {"policies": [Once("1h")]},
}


async def count(look: Look, attempts: int, deliveries: int) -> None:
    """Let the live messages have been tried and delivered so often."""
    counts = f"attempts_count = {attempts}, deliveries_count = {deliveries}"
    async with look.engine.begin() as connection:
        await connection.execute(text(f"UPDATE message SET {counts}"))


async def test_retries_without_a_limit_go_on(broker: SqlBroker, look: Look, heard: Heard) -> None:
    """A nack is an outcome, in every way of delivery."""
    calls: dict[str, int] = dict.fromkeys(MODES, 0)

    def fails_thrice(mode: str) -> Any:
        async def handle(body: Any, message: SqlBrokerMessage) -> None:
            calls[mode] += 1
            if calls[mode] == 1 and mode != "once":
                raise ConnectionError("away")
            if calls[mode] <= 3:
                await message.nack(delay=0) if mode != "once" else await message.postpone(0)

        async def handle_connected(
            body: Any, message: SqlBrokerMessage, connection: SqlConnection
        ) -> None:
            await handle(body, message)

        return handle_connected if mode == "transactional" else handle

    for mode, options in MODES.items():
        broker.subscriber(mode, **CALM, retry_strategy=FOREVER, **options)(fails_thrice(mode))
        await broker.publish("x", mode, key="k")
    await count(look, SPENT, SPENT)
    await broker.start()
    rows = await look.archived(len(MODES))
    ended = {r["queue"]: (r["state"], r["attempts_count"], r["deliveries_count"]) for r in rows}
    often = ("COMPLETED", SPENT + 4, SPENT + 4)
    assert ended == dict.fromkeys(MODES, often) | {"once": ("COMPLETED", SPENT + 1, SPENT + 1)}
    assert not heard.texts("delivery limit")


@pytest.mark.parametrize("strategy", [FOREVER, FEW, None], ids=["forever", "few", "none"])
async def test_lost_leases_end_a_message_however_often_it_was_tried(
    broker: SqlBroker, look: Look, heard: Heard, strategy: Any
) -> None:
    """The last delivery that is permitted still runs; the next does not."""
    attempts = 1_000 if strategy is FOREVER else 2 if strategy else 0
    ran: list[str] = []

    @broker.subscriber("q", **QUICK, retry_strategy=strategy, max_deliveries=4)
    async def handle(body: str) -> None:
        ran.append(body)

    await broker.publish("last", "q")
    await count(look, attempts, attempts + 3)
    await broker.start()
    await look.archived(1)
    await broker.stop()
    await broker.publish("over", "q")
    await count(look, attempts, attempts + 4)
    await broker.start()
    row = (await look.archived(2))[1]
    assert (row["state"], row["reason"]) == ("FAILED", "max_deliveries")
    assert (row["attempts_count"], row["deliveries_count"]) == (attempts, attempts + 5)
    assert ran == ["last"]
    assert len(heard.texts("delivery limit was exceeded", logging.ERROR)) == 1


async def test_reservations_are_limited_alike(broker: SqlBroker, look: Look) -> None:
    await broker.publish("x", "q")
    await count(look, SPENT, SPENT)
    for _ in range(3):
        reservation = await broker.reserve("q", retry_strategy=FOREVER, wait=60)
        assert reservation is not None
        await reservation.rollback(0)
    await count(look, 1_000, 1_000 + SPENT)
    assert await broker.reserve("q", retry_strategy=FOREVER) is not None, "the last one"
    await expire(look)
    assert await broker.reserve("q", retry_strategy=FOREVER) is None
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "max_deliveries")


async def test_a_hand_back_is_no_lost_lease_without_a_limit(broker: SqlBroker, look: Look) -> None:
    """It costs an attempt there. Else it costs none, and the limit of deliveries ends it."""
    for queue, strategy in {"forever": FOREVER, "few": FEW}.items():
        subscriber = broker.subscriber(queue, retry_strategy=strategy, max_deliveries=2)
        await broker.publish("x", queue)
        for _ in range(2):
            async with aclosing(aiter(subscriber)) as messages:
                async for _message in messages:
                    break
    rows = {r["queue"]: (r["attempts_count"], r["deliveries_count"]) for r in await look.rows()}
    assert rows == {"forever": (2, 2), "few": (0, 2)}
    [few] = [s for s in broker.subscribers if "few" in s.queues]
    assert await few.get_one(timeout=0) is None
    [row] = await look.rows(archive=True)
    assert (row["queue"], row["reason"]) == ("few", "max_deliveries")


@pytest.mark.parametrize("strategy", [FOREVER, FEW], ids=["forever", "few"])
async def test_a_handler_that_a_stop_cuts_off(broker: SqlBroker, look: Look, strategy: Any) -> None:
    broker.config.broker_config.graceful_timeout = 0.01
    started: list[str] = []

    @broker.subscriber("q", **QUICK, retry_strategy=strategy)
    async def handle(body: str) -> None:
        started.append(body)
        await eventually(lambda: False)

    await broker.publish("x", "q")
    await broker.start()
    await eventually(lambda: started)
    await broker.stop()
    row = await look.in_state("PENDING")
    assert (row["attempts_count"], row["deliveries_count"]) == (int(strategy is FOREVER), 1)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_outage_in_a_test_broker(broker: SqlBroker, look: Look) -> None:
    """As with the engine: many retries make no dead letter."""
    runs = 0

    @broker.subscriber("relay", retry_strategy=ConstantRetryStrategy(delay_seconds=30))
    async def relay(body: str) -> None:
        nonlocal runs
        runs += 1
        if runs <= 25:
            raise ConnectionError("away")

    clock = VirtualClock()
    async with TestSqlBroker(broker, connect_only=False, clock=clock):
        with pytest.raises(ConnectionError):
            await broker.publish("x", "relay")
        await clock.advance("13m")
        assert (await broker.drain()).waiting == []
    assert runs == 26
