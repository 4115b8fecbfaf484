"""The subscribers of a soak that other cells have not: policies, moves and a schedule."""

import asyncio
from datetime import datetime
from typing import Any

from faststream_sqlbroker import (
    Concurrency,
    ConstantRetryStrategy,
    Debounce,
    Once,
    SqlBroker,
    SqlBrokerMessage,
    Throttle,
)
from tests.faults.handlers import Handlers
from tests.faults.plan import PER, RATE
from tests.processes.policy_worker import LOOKED, note_looks

THROTTLED = "throttled"
DEBOUNCED = "debounced"
ONCE_A_KEY = "once a key"
FORWARDED = "forwarded"
DYING = "dying"
DEAD = "dead"
TICKS = "ticks"
FEATURES = (THROTTLED, DEBOUNCED, ONCE_A_KEY, FORWARDED, DYING)
"""Queues that a soak publishes to."""
EVERY = 2
"""Seconds between two ticks of the schedule."""


def subscribe_all(broker: SqlBroker, handlers: Handlers, options: dict[str, Any]) -> None:
    """A subscriber for each of `FEATURES`, for dead letters and for a schedule; `options` are those
    of every subscriber."""
    note_looks()

    async def quiet(number: int, message: SqlBrokerMessage) -> None:
        """Work without an answer, and without a failure."""
        handlers.start(number, message, looked=LOOKED.get(message.raw_message.id))
        await handlers.work([number], message.queue)
        handlers.end(message, "ack")

    async def die(number: int) -> None:
        """Fail until the message is dead; what starts in the next queue is noted."""
        await asyncio.sleep(0)
        raise RuntimeError(f"message {number} always fails")

    def subscriber(queue: str, **more: Any) -> Any:
        return broker.subscriber(queue, **{**options, **more})

    twice = ConstantRetryStrategy(delay_seconds=0.02, max_attempts=2)
    policies = {
        THROTTLED: [Throttle(RATE, per=PER), Concurrency(2)],
        DEBOUNCED: [Debounce(0.5, max_wait=2)],
        ONCE_A_KEY: [Once("1h")],
    }
    limits: dict[str, dict[str, Any]] = {
        THROTTLED: {"throttle": [RATE, PER], "concurrency": 2},
        DEBOUNCED: {"debounce": True},
        ONCE_A_KEY: {"once": True},
    }
    for queue, those in policies.items():
        handlers.subscribe(queue, options, **limits[queue])
        subscriber(queue, policies=those)(quiet)
    subscriber(FORWARDED, forward_to="plain")
    subscriber(DYING, dead_letter_queue=DEAD, retry_strategy=twice)(die)
    handlers.subscribe(DEAD, {**options, "transactional": True})
    subscriber(DEAD, transactional=True)(broker.publisher("out")(handlers.tx))

    @broker.schedule(f"*/{EVERY} * * * * *", queue=TICKS, name="tick", missed="all")
    def tick(at: datetime) -> int:
        return int(at.timestamp())

    @subscriber(TICKS)
    async def ticked(number: int) -> None:
        await asyncio.sleep(0)
