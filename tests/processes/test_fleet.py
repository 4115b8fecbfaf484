"""Promises 1, 2 and 8 with real processes: nothing lost, nothing twice without a reason."""

import signal

import pytest

from tests.helpers import eventually
from tests.processes.conftest import MOST_ROUNDS, Fleet
from tests.processes.worker import gate

MANY = 2_000
ROUND = 500
WORKERS = 4
SEARCHING = {"release_stuck_timeout": 60.0, "release_stuck_interval": 0.3}
"""A lease that a pause of the machine does not end."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.capability("work shared by processes; no message lost by SIGKILL or SIGTERM"),
]


async def test_each_message_is_handled_exactly_once_when_nothing_fails(fleet: Fleet) -> None:
    """F11; in rounds, as one process may do all of a round while the others stand still."""
    for _ in range(WORKERS):
        fleet.start()
    await fleet.live(WORKERS)
    for rounds in range(1, MOST_ROUNDS + 1):
        await fleet.publish(ROUND)
        if rounds * ROUND >= MANY:
            await fleet.settled(rounds * ROUND)
            if fleet.is_shared():
                break
    by = {pid: bodies.total() for pid, bodies in fleet.started().items()}
    assert fleet.is_shared(), f"starts by process: {by}"
    await fleet.stop()
    assert fleet.total() == dict.fromkeys(range(ROUND), rounds)
    once = "state = 'COMPLETED' AND deliveries_count = 1"
    assert await fleet.count(once, archive=True) == rounds * ROUND


async def test_a_killed_worker_loses_nothing(fleet: Fleet) -> None:
    """Extra deliveries are those that the killed process held."""
    await fleet.publish(MANY)
    victim = fleet.start(**SEARCHING)
    await eventually(lambda: len(fleet.started().get(victim.pid, ())) > 500, step=0.05)
    victim.kill()
    for _ in range(WORKERS - 1):
        fleet.start(**SEARCHING)
    await fleet.settled(MANY)
    await fleet.stop()
    total = fleet.total()
    victims = fleet.started()[victim.pid]
    assert set(total) == set(range(MANY))
    twice = {body for body, times in total.items() if times > 1}
    assert twice <= set(victims)
    assert max(total.values()) <= 2
    again = await fleet.count("deliveries_count > 1", archive=True)
    assert again >= len(twice)
    # What it may have held: the buffer, and the outcomes of flush_batch_size and one claim.
    assert again <= 150 + 2 * 500
    assert await fleet.count("deliveries_count > 2 OR state <> 'COMPLETED'", archive=True) == 0


async def test_sigterm_hands_back_a_thousand_messages(fleet: Fleet) -> None:
    """F10: no PROCESSING row stays; what was not started is not charged."""
    running = 40
    await fleet.publish(1_000 + running)
    worker = fleet.start(
        "hang_later",
        max_workers=running,
        fetch_batch_size=1_000,
        graceful_timeout=0.5,
        longest_wait=600.0,
    )

    async def all_is_held() -> bool:
        return (
            len(fleet.total()) == 2 * running
            and await fleet.count("state = 'PROCESSING'") == 1_000
            and await fleet.count(archive=True) == running
        )

    await eventually(all_is_held)
    worker.send_signal(signal.SIGTERM)
    assert await fleet.ended(worker) == 0
    assert (
        await fleet.count("state = 'PENDING' AND attempts_count = 0 AND lease_token IS NULL")
        == 1_000
    )
    assert await fleet.count("deliveries_count = 0") == 1_000 - running
    assert await fleet.count("deliveries_count = 1") == running
    assert await fleet.count(archive=True) == running


async def test_sigterm_lets_running_handlers_end(fleet: Fleet) -> None:
    await fleet.publish(100)
    worker = fleet.start("slow", max_workers=10, graceful_timeout=60.0)
    await eventually(lambda: len(fleet.total()) >= 10)
    worker.send_signal(signal.SIGTERM)
    assert await fleet.ended(worker) == 0
    finished = len(fleet.total())
    assert await fleet.count("state = 'COMPLETED' AND attempts_count = 1", archive=True) == finished
    assert await fleet.count("state = 'PENDING' AND deliveries_count = 0") == 100 - finished


async def test_a_message_that_kills_its_process_ends_in_the_dead_letters(fleet: Fleet) -> None:
    """F6: with the default limit, while the others are handled."""
    await fleet.publish(3)
    first = min(row["id"] for row in await fleet.rows())
    limit = 13  # the default strategy's 10 attempts, and 3
    alike = 8  # deaths after the first one that need not be died
    leases = {"release_stuck_timeout": 60, "release_stuck_interval": 0.1}
    for death in range(limit + 2):
        worker = fleet.start("poison", **leases)
        await eventually(
            lambda worker=worker: worker.poll() is not None or _is_settled(fleet),
            timeout=120,
            step=0.05,
        )
        if worker.poll() is None:
            break
        await fleet.bury()
        if death == 0:
            more = f"UPDATE message SET deliveries_count = deliveries_count + {alike}"
            await fleet.execute(f"{more} WHERE id = {first}")
    await fleet.settled(3)
    await fleet.stop()
    assert fleet.total()[0] == limit - alike
    dead = [r for r in await fleet.rows(archive=True) if r["payload"] == b"0"]
    assert [(r["state"], r["reason"], r["attempts_count"]) for r in dead] == [
        ("FAILED", "max_deliveries", 0)
    ]
    assert dead[0]["deliveries_count"] == limit + 1
    assert await fleet.count("state = 'COMPLETED'", archive=True) == 2


async def test_f6_with_two_deliveries_no_neighbour_of_a_poison_message_is_lost(
    fleet: Fleet,
) -> None:
    """Neither those that were leased with it and never started, nor those that meet another one
    later."""
    neighbours = 5
    await fleet.publish(1 + neighbours)
    options = {
        "max_deliveries": 2,
        "max_workers": 1,
        "release_stuck_timeout": 60,
        "release_stuck_interval": 0.1,
        "retry_strategy": None,
        "counts_as_quick": True,
    }
    deaths = 0
    for _ in range(8):
        worker = fleet.start("poison", **options)
        await eventually(
            lambda worker=worker: worker.poll() is not None or _is_settled(fleet),
            timeout=120,
            step=0.05,
        )
        if worker.poll() is None:
            break
        deaths += 1
        if deaths == 1:
            assert await fleet.count("deliveries_count = 1") >= 1
            await fleet.publish(1)  # another poison message, fresh
        await fleet.bury()
    await fleet.settled(2 + neighbours)
    await fleet.stop()
    rows = await fleet.rows(archive=True)
    dead = [r for r in rows if r["payload"] == b"0"]
    assert [(r["state"], r["reason"], r["deliveries_count"]) for r in dead] == [
        ("FAILED", "max_deliveries", 3)
    ] * 2
    assert {r["state"] for r in rows if r["payload"] != b"0"} == {"COMPLETED"}
    assert fleet.total() == {0: 4, **dict.fromkeys(range(1, 1 + neighbours), 1)}
    assert deaths == 4


async def _is_settled(fleet: Fleet) -> bool:
    await fleet.bury()
    return await fleet.count() == 0


async def test_a_synchronous_handler_that_cannot_be_cancelled_keeps_its_lease(fleet: Fleet) -> None:
    """Its thread may still be at work: the row comes back when the lease expires, not before."""
    await fleet.publish(1)
    worker = fleet.start("block", graceful_timeout=0.2)
    await eventually(lambda: len(fleet.total()) == 1)
    await fleet.live(1)
    worker.send_signal(signal.SIGTERM)
    await fleet.live(0)  # the stop has given up on the handler
    gate(fleet.folder).touch()
    assert await fleet.ended(worker) == 0
    assert (
        await fleet.count("state = 'PROCESSING' AND deliveries_count = 1 AND attempts_count = 0")
        == 1
    )
