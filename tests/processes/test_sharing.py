"""Fair sharing with real processes: none claims what others could start sooner."""

import signal
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import OperationalError

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.flow.deliver.prefetch import PREFETCH_LEASE
from tests.forked import Process
from tests.helpers import eventually
from tests.processes.conftest import Fleet
from tests.processes.worker import gate

QUICK = {"max_fetch_interval": 0.1}
HEADERS = '{"content-type": "application/json"}'
URGENT = 999

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.capability("slow work shared evenly by processes, urgent messages first"),
]


async def test_two_processes_share_slow_messages(fleet: Fleet) -> None:
    """Four messages at a time run in both, two in each, however slow one of them is."""
    workers = [fleet.start("gated", max_workers=2, longest_wait=600.0, **QUICK) for _ in range(2)]
    await fleet.live(2)
    opened = gate(fleet.folder)
    for turn in range(1, 4):
        opened.unlink(missing_ok=True)
        await fleet.publish(4)
        # None ends before all have started: one that waited behind another would never start.
        await eventually(lambda: fleet.total().total() == 4 * turn)
        opened.touch()
        await fleet.settled(4 * turn)
    await fleet.stop()
    started = fleet.started()
    assert [started[worker.pid].total() for worker in workers] == [6, 6]
    assert await fleet.count("deliveries_count = 1", archive=True) == 12


async def test_an_urgent_message_starts_within_two_handler_times(fleet: Fleet) -> None:
    """Not after those that its process has claimed before: each worker starts one of them at
    most."""
    workers = 10
    worker = fleet.start("gated", max_workers=workers, **QUICK)
    gate(fleet.folder).touch()
    await fleet.publish(2 * workers)
    await fleet.settled(2 * workers)  # so that it knows how long a handler takes
    gate(fleet.folder).unlink()
    await fleet.publish(120)
    await eventually(lambda: fleet.total().total() == 3 * workers)
    await fleet.store.insert([NewMessage("q", str(URGENT).encode(), HEADERS, priority=9)])
    gate(fleet.folder).touch()
    await fleet.settled(2 * workers + 121)
    await fleet.stop()
    before = fleet.order(worker).index(URGENT) - 3 * workers
    assert before <= workers, f"{before} others started before it"


async def test_messages_that_a_dead_or_stopped_process_had_not_started_are_handled_soon(
    fleet: Fleet,
) -> None:
    """A process that resumes starts nothing that others have; its heartbeat decides nothing."""
    await fleet.publish(600)
    stopped = await _stalled(fleet, at=200)
    await _stop_without_lock(fleet, stopped)
    killed = await _stalled(fleet, at=400)
    killed.kill()
    leased = [row for row in await fleet.rows() if row["state"] == "PROCESSING"]
    waiting = [row for row in leased if row["payload"] not in {b"200", b"400"}]
    # Long before the ten minutes of a subscriber's lease.
    soon = await fleet.store.server.read_now() + timedelta(seconds=PREFETCH_LEASE)
    assert len(waiting) > 2
    # Each may have claimed one for its only worker when that was free.
    assert sum(row["lease_expires_at"] > soon for row in waiting) <= 2
    # No process waits here for what runs.
    leases = {row["id"]: min(row["lease_expires_at"], soon) for row in leased}
    message = fleet.store.tables.message
    async with fleet.store.engine.begin() as connection:
        longer = update(message).where(message.c.lease_expires_at > soon)
        await connection.execute(longer.values(lease_expires_at=soon))
    gate(fleet.folder).touch()
    fleet.start("stalls", **QUICK)

    async def all_are_handled() -> bool:
        return await fleet.count(archive=True) == 600

    await eventually(all_are_handled, timeout=200, step=0.1)
    for row in await fleet.rows(archive=True):
        if row["id"] in leases:
            assert row["acquired_at"] >= leases[row["id"]], "its lease had to run out first"
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
    assert await fleet.count("deliveries_count = 2", archive=True) >= len(leases)
    assert await fleet.count("deliveries_count > 2 OR state <> 'COMPLETED'", archive=True) == 0


async def _stop_without_lock(fleet: Fleet, worker: Process) -> None:
    """Stop it while it writes nothing: on SQLite all others would wait for the end of its write."""

    async def stopped_without_lock() -> bool:
        worker.send_signal(signal.SIGSTOP)
        try:
            async with fleet.store.engine.begin() as connection:
                await connection.execute(text("UPDATE message SET priority = 0 WHERE 1 = 0"))
        except OperationalError:
            worker.send_signal(signal.SIGCONT)
            return False
        return True

    await eventually(stopped_without_lock)


async def _stalled(fleet: Fleet, *, at: int) -> Process:
    """A worker whose handler waits at the body `at`, what was before it is written, and others
    wait there."""
    worker = fleet.start("stalls", longest_wait=600.0, **QUICK)
    await eventually(lambda: fleet.started().get(worker.pid, Counter())[at])

    async def all_is_written() -> bool:
        started = fleet.total()
        return await fleet.count(archive=True) == sum(
            n for body, n in started.items() if body not in {200, 400}
        )

    await eventually(all_is_written)
    return worker
