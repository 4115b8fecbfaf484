"""batch_max_wait: a batch waits for its messages, no longer than it may."""

import asyncio
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy import text

from faststream_sqlbroker import Concurrency, SqlBroker, Throttle
from tests.clock import VirtualTime
from tests.faststream.conftest import QUICK, Look, on_each
from tests.helpers import eventually

LONG = 500.0
"""Seconds; no test takes so long."""
WAITS: Any = {**QUICK, "batch": True, "batch_max_wait": LONG}

Batches = list[list[Any]]


def subscribe(broker: SqlBroker, **options: Any) -> Batches:
    got = Batches()

    @broker.subscriber("q", **{**WAITS, **options})
    async def handle(bodies: list[Any]) -> None:
        got.append(bodies)

    return got


async def leased(look: Look, count: int) -> list[dict[str, Any]]:
    async def found() -> list[dict[str, Any]]:
        rows = await look.rows()
        return rows if sum(row["state"] == "PROCESSING" for row in rows) == count else []

    return await eventually(found)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several workers": {"max_workers": 3},
    "transactional": {"transactional": True},
    "acked first": {"ack_policy": AckPolicy.ACK_FIRST},
    "few at a time": {"policies": [Concurrency(5)]},
    "ordered": {"ordered": True},
    "a claim for each": {"fetch_batch_size": 3, "max_not_processed_factor": 1.0},
}
OF_THIS_PROCESS = ["several workers", "a claim for each"]
"""Those that change nothing of what the database does."""


@on_each(
    "kind",
    [kind for kind in KINDS if kind not in OF_THIS_PROCESS],
    OF_THIS_PROCESS,
)
async def test_a_batch_starts_when_it_is_full(broker: SqlBroker, look: Look, kind: str) -> None:
    """And not before: each message is claimed by itself, and waits for the others."""
    got = subscribe(broker, batch_max_records=3, **KINDS[kind])
    await broker.start()
    for start in (0, 3):
        for n in range(start, start + 3):
            await broker.publish(n, "q", key=f"{n}")
            if n % 3 < 2:
                await leased(look, n % 3 + 1)
        await look.archived(start + 3)
    assert got == [[0, 1, 2], [3, 4, 5]]
    assert {row["deliveries_count"] for row in await look.rows(archive=True)} == {1}


async def test_it_starts_with_what_it_has_when_the_time_is_over(
    broker: SqlBroker, look: Look
) -> None:
    wait = 0.4
    got = subscribe(broker, batch_max_wait=wait)
    await broker.start()
    await broker.publish(0, "q")
    await leased(look, 1)
    await broker.publish(1, "q")
    first, _ = await look.archived(2)
    assert got in ([[0, 1]], [[0], [1]])  # on a busy machine the second may come too late
    waited = first["first_attempt_at"] - first["acquired_at"]
    assert waited.total_seconds() >= 0.9 * wait


async def test_its_leases_are_renewed(broker: SqlBroker, look: Look) -> None:
    """Another process that looks for expired leases finds none."""
    broker._clock.use(time := VirtualTime())
    got = subscribe(broker, batch_max_wait=50.0, release_stuck_timeout=60.0)
    await broker.publish(0, "q")
    await broker.start()
    [first] = await leased(look, 1)
    await time.advance(30.0)

    async def renewed() -> bool:
        [row] = await look.rows()
        return bool(row["lease_expires_at"] > first["lease_expires_at"])

    await eventually(renewed)
    assert got == []
    await time.advance(LONG)
    await eventually(lambda: got == [[0]])

    async def archived() -> list[dict[str, Any]]:
        await time.advance(0.1)
        return await look.rows(archive=True)

    [row] = await eventually(archived)
    assert row["deliveries_count"] == 1


async def test_a_stop_gives_it_back_at_once(broker: SqlBroker, look: Look) -> None:
    got = subscribe(broker, max_workers=2)
    await broker.start()
    await broker.publish_batch(0, 1, queue="q")
    await leased(look, 2)
    async with asyncio.timeout(LONG / 10):
        await broker.stop()
    assert got == []
    rows = await look.rows()
    assert {(r["state"], r["attempts_count"], r["deliveries_count"]) for r in rows} == {
        ("PENDING", 0, 0)
    }


async def test_a_pause_lets_it_start_at_once(broker: SqlBroker, look: Look) -> None:
    """As what already runs, it goes on to its end."""
    got = subscribe(broker)
    await broker.start()
    await broker.publish_batch(0, 1, queue="q")
    await leased(look, 2)
    await broker.admin.pause("q")
    await look.archived(2)
    assert got == [[0, 1]]


async def test_a_message_that_would_expire_is_not_made_to_wait(
    broker: SqlBroker, look: Look
) -> None:
    got = subscribe(broker)
    await broker.start()
    await broker.publish(0, "q")
    await leased(look, 1)
    assert got == []
    await broker.publish(1, "q", expires_in=LONG / 2)
    rows = await look.archived(2)
    assert got == [[0, 1]]
    assert {row["state"] for row in rows} == {"COMPLETED"}


async def test_no_slot_is_missed(broker: SqlBroker, look: Look) -> None:
    got = subscribe(broker, policies=[Throttle(100, per="1s")])
    await broker.start()
    await broker.publish_batch(*range(3), queue="q")
    await look.archived(3)
    # Not in their order: what stands still beyond its slot is given back, and comes after others.
    assert sorted(body for bodies in got for body in bodies) == [0, 1, 2]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_a_suspect_is_not_kept_waiting(broker: SqlBroker, look: Look) -> None:
    """What may have killed its process runs alone: the batch that is being filled starts first."""
    got = subscribe(broker, max_deliveries=10)
    suspect = await broker.publish("suspect", "q", delay=LONG)
    async with look.engine.begin() as connection:
        await connection.execute(text("UPDATE message SET deliveries_count = 3"))
    await broker.start()
    await broker.publish("other", "q")
    await leased(look, 1)
    await broker.admin.retry_now(suspect, by="the test")
    await look.archived(2)
    assert got == [["other"], ["suspect"]]
