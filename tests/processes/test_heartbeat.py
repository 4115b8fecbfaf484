"""P5 and heartbeats of real processes: the database knows which live, even after a kill."""

import signal
from datetime import datetime, timedelta
from typing import Any

import pytest

from faststream_sqlbroker import SqlBroker
from tests.helpers import eventually
from tests.processes.conftest import Fleet

pytestmark = pytest.mark.timeout(600)

QUICK: dict[str, Any] = {"presence_interval": 1.0, "max_fetch_interval": 0.1}


def admin(fleet: Fleet) -> Any:
    """An operator's, in a process of its own: without subscribers."""
    return SqlBroker(fleet.store.engine, logger=None).admin


async def workers(fleet: Fleet, *pids: int) -> Any:
    """Wait until exactly these processes count as alive."""

    async def told() -> Any:
        found = await admin(fleet).subscribers("q")
        return found if sorted(_pid(s.worker) for s in found) == sorted(pids) else None

    return await eventually(told, step=0.05) if pids else await _without_live_workers(fleet)


async def _without_live_workers(fleet: Fleet) -> list[Any]:
    async def gone() -> bool:
        return not await admin(fleet).subscribers()

    await eventually(gone, step=0.05)
    return []


def _pid(worker: str) -> int:
    return int(worker.split(":")[-2])


async def test_a_killed_process_is_no_longer_listed_and_its_messages_are_explained(
    fleet: Fleet,
) -> None:
    """Its lease ends its presence; a process that is stopped well says good-bye."""
    await fleet.publish(1)
    [row] = await fleet.rows()
    victim = fleet.start("hang", searches=False, **QUICK)
    await eventually(lambda: fleet.total()[0] == 1)
    [found] = await workers(fleet, victim.pid)

    async def told(*expected: tuple[str, str | None]) -> Any:
        reasons = (await admin(fleet).explain(row["id"])).reasons
        return [(r.code, r.worker) for r in reasons] == [*expected]

    # While a heartbeat is late there is a reason more.
    await eventually(lambda: told(("processing", found.worker)), step=0.05)
    # Alive until it says good-bye: its lease would last for minutes.
    survivor = fleet.start("hang", searches=False, presence_interval=60.0)
    await workers(fleet, victim.pid, survivor.pid)
    victim.kill()
    [alive] = await workers(fleet, survivor.pid)
    await fleet.expire()
    await eventually(lambda: told(("lease_expired", found.worker)), step=0.05)
    assert alive.worker != found.worker
    survivor.send_signal(signal.SIGTERM)
    assert await fleet.ended(survivor) == 0
    assert await admin(fleet).subscribers() == [], "a stop says good-bye before the lease ends"
    reasons = (await admin(fleet).explain(row["id"])).reasons
    assert [r.code for r in reasons] == ["lease_expired", "no_live_subscriber"]


async def test_a_pause_survives_the_restart_of_all_workers(fleet: Fleet) -> None:
    """P5: nothing of a paused queue is started by a process that was there, or that comes later."""
    first = [fleet.start(**QUICK) for _ in range(2)]
    await workers(fleet, *(w.pid for w in first))
    await fleet.publish(10)
    await fleet.settled(10)
    await admin(fleet).pause("q", reason="maintenance")

    async def heard(pids: list[int]) -> None:
        # Of two signs of life since now, the second was begun after the pause, and has read it.
        for _ in range(2):
            lease = timedelta(seconds=4 * QUICK["presence_interval"])
            ends = await fleet.store.server.read_now() + lease

            async def told(ends: datetime = ends) -> bool:
                return all(s.lease_expires_at > ends for s in await workers(fleet, *pids))

            await eventually(told, step=0.05)

    await heard([w.pid for w in first])
    await fleet.publish(200)
    await fleet.stop()
    second = [fleet.start(**QUICK) for _ in range(2)]
    await workers(fleet, *(w.pid for w in second))
    await heard([w.pid for w in second])
    second[0].kill()
    third = fleet.start(**QUICK)
    await workers(fleet, second[1].pid, third.pid)
    assert await fleet.count("state = 'PENDING' AND deliveries_count = 0") == 200
    assert sum(fleet.total().values()) == 10
    assert await admin(fleet).resume("q")
    await fleet.settled(210)
    await fleet.stop()
    assert fleet.total() == {n: 2 if n < 10 else 1 for n in range(200)}


async def test_a_pause_under_load_loses_nothing(fleet: Fleet) -> None:
    """P5: paused and resumed while four processes work; each message is handled once."""
    many = 4_000
    await fleet.publish(many)
    for _ in range(3):
        fleet.start(**QUICK)
    await eventually(lambda: len(fleet.total()) > 100)
    for _ in range(3):
        await admin(fleet).pause("q", until="1h")
        await fleet.count()
        await admin(fleet).resume("q")
    await admin(fleet).pause("q")

    async def at_rest() -> bool:
        return not await fleet.count("state = 'PROCESSING'")

    await eventually(at_rest, step=0.1)
    await admin(fleet).resume("q")
    await fleet.settled(many)
    await fleet.stop()
    assert fleet.total() == dict.fromkeys(range(many), 1)
    assert await fleet.count("deliveries_count = 1 AND attempts_count = 1", archive=True) == many
