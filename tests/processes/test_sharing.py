"""Fair sharing with real processes: none claims what others could start sooner."""

import signal
import time
from collections import Counter

import pytest

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.flow.prefetch import PREFETCH_LEASE
from tests.forked import Process
from tests.helpers import eventually
from tests.processes.conftest import Fleet

QUICK = {"max_fetch_interval": 0.1}
HANDLER = 0.5
"""Seconds of the handler `slow`."""
URGENT = 999

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.capability("slow work shared evenly by processes, urgent messages first"),
]


async def _live(fleet: Fleet, count: int) -> None:
    async def all_live() -> bool:
        return len(await fleet.store.live_subscribers.subscribers()) == count

    await eventually(all_live, timeout=30, step=0.05)


async def test_two_processes_share_slow_messages(fleet: Fleet) -> None:
    workers = [fleet.start("steady", max_workers=2, **QUICK) for _ in range(2)]
    await _live(fleet, 2)
    await fleet.publish(100)
    await fleet.settled(100)
    await fleet.stop()
    started = fleet.started()
    shares = [started[worker.pid].total() for worker in workers]
    assert sum(shares) == 100
    assert all(40 <= share <= 60 for share in shares), shares


async def test_an_urgent_message_starts_within_two_handler_times(fleet: Fleet) -> None:
    fleet.start("slow", max_workers=10, **QUICK)
    await _live(fleet, 1)
    await fleet.publish(140)
    await eventually(lambda: fleet.total().total() >= 20, timeout=30)
    headers = '{"content-type": "application/json"}'
    published = time.monotonic()
    await fleet.store.insert([NewMessage("q", str(URGENT).encode(), headers, priority=9)])
    await eventually(lambda: fleet.total()[URGENT], step=0.005)
    took = time.monotonic() - published
    others = fleet.total().total() - 1
    await fleet.settled(141)
    await fleet.stop()
    assert took <= 2 * HANDLER, f"it took {took:.2f} s"
    assert others <= 60


async def test_messages_that_a_dead_or_stopped_process_had_not_started_are_handled_soon(
    fleet: Fleet,
) -> None:
    """A process that resumes starts nothing that others have; its heartbeat decides nothing."""
    await fleet.publish(600)
    stopped = await _stalled(fleet, at=200)
    stopped.send_signal(signal.SIGSTOP)
    killed = await _stalled(fleet, at=400)
    killed.kill()
    began = time.monotonic()
    left = await fleet.count("state = 'PROCESSING'")
    fleet.start("stalls", **QUICK)
    await fleet.settled(600, timeout=90)
    took = time.monotonic() - began
    # 20 s of a lease, 5 s to the next search, and the start of a process on a busy machine.
    assert took <= 45, f"{left} messages took {took:.0f} s"
    assert took >= PREFETCH_LEASE / 2, "their leases had to run out first"
    stopped.send_signal(signal.SIGCONT)
    await fleet.publish(10)
    await fleet.settled(610)
    await fleet.stop()
    started = fleet.started()
    # Bodies 0 … 9 were published twice, and any process may have the second ones.
    of_the_stopped = {body: n for body, n in started[stopped.pid].items() if body >= 10}
    assert of_the_stopped == dict.fromkeys(range(10, 201), 1)
    assert max((fleet.total() - Counter(range(10))).values()) <= 2
    # The waiting rows of both, each charged as if they had been started.
    assert await fleet.count("deliveries_count = 2", archive=True) >= left
    assert await fleet.count("deliveries_count > 2 OR state <> 'COMPLETED'", archive=True) == 0


async def _stalled(fleet: Fleet, *, at: int) -> Process:
    """A worker whose handler takes its time for the body `at`, what was before it is written, and
    others wait there."""
    worker = fleet.start("stalls", longest_wait=60.0, **QUICK)
    await eventually(lambda: fleet.started().get(worker.pid, Counter())[at], timeout=30)

    async def all_is_written() -> bool:
        started = fleet.total()
        return await fleet.count(archive=True) == sum(
            n for body, n in started.items() if body not in {200, 400}
        )

    await eventually(all_is_written, timeout=20)
    return worker
