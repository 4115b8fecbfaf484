"""Throttle by key: a slot is taken at the claim, and what waits for one stays as it is (Z10)."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from faststream_sqlbroker.core.policies import Concurrency, Debounce, Policy, Throttle, throttle
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.store import Store
from tests.flow.conftest import Rig
from tests.flow.test_policy_limits import Process, backlog
from tests.policies.clock import MICROSECONDS, Clock
from tests.quick_tables import TABLES

HOURLY = Throttle(1, per="1h", key=True)
MILLISECOND = 1_000
"""The clock's step, in microseconds: a period is over a moment later."""
LATE = 10 * MICROSECONDS
"""More than a start may be later than its slot that was not told."""
MANY = 450
"""More messages than a claim looks at."""


async def claimed(process: Process, limit: int = 10) -> list[int]:
    return [row.id for row in (await process.claim(limit)).rows]


@pytest.fixture
async def clock(database_url: str) -> AsyncIterator[Clock]:
    """The database's, which stands still until it is set."""
    clock = Clock(database_url)
    await clock.prepare()
    yield clock
    await clock.engine.dispose()


@pytest.fixture
async def held(clock: Clock) -> AsyncIterator[Rig]:
    """Over a database with that clock."""
    store = Store(clock.engine, TABLES)
    await store.server.create_tables()
    await store.server.setup()
    yield Rig(store)
    await store.close()


async def test_an_urgent_message_is_not_behind_slots_that_were_given_away(
    held: Rig, clock: Clock
) -> None:
    """It takes the next slot of its key, before what has waited longer."""
    await held.put(6, key="a")
    process = Process(held, [Throttle(1, per="3s", key=True)])
    assert len(await claimed(process)) == 1
    assert await claimed(process) == []
    [urgent] = await held.put(1, key="a", priority=100)
    await clock.set(clock.now + 3 * MICROSECONDS + LATE)
    assert await claimed(process) == [urgent]


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with other options are gone for longer than their options hold."""
    monkeypatch.setattr(throttle, "OTHER_LIMITS_LIFETIME", -3_600_000_000)


@pytest.mark.usefixtures("gone")
async def test_nothing_is_written_to_what_waits(rig: Rig) -> None:
    """It keeps its due time, so it is free as soon as the policy is removed, or allows more."""
    ids = await rig.put(6, key="a")
    before = await rig.rows()
    first = await claimed(Process(rig, [HOURLY]))
    assert first == ids[:1]
    assert [row for row in await rig.rows() if row["id"] != ids[0]] == before[1:]
    raised = Throttle(1_000_000, per="1s", key=True)
    assert len(await claimed(Process(rig, [raised]), 3)) == 3
    assert len(await claimed(Process(rig, [Concurrency(100)]), 3)) == 2


async def test_what_expires_takes_no_slot(held: Rig, clock: Clock) -> None:
    """The slots that come are for messages that are handled."""
    await held.put(1, key="a")
    process = Process(held, [Throttle(1, per="2s", key=True)])
    [first] = (await process.claim()).rows
    expired = await held.put(5, key="a", expires_in=0.001)
    [last] = await held.put(1, key="a")
    await clock.set(clock.now + 2 * MICROSECONDS + LATE)
    found: dict[int, ClaimedMessage] = {}
    for _ in range(10):
        found.update({row.id: row for row in (await process.claim()).rows})
    assert found.keys() == {*expired, last}
    assert found[last].slot is not None
    assert first.slot is not None
    late = found[last].slot.granted_at - first.slot.granted_at - 2 * MICROSECONDS
    assert 0 <= late <= LATE + MICROSECONDS


@pytest.mark.parametrize(
    "policies",
    [[HOURLY], [Debounce("1ms"), HOURLY], [Concurrency(50, per_key=True), HOURLY]],
    ids=["throttle", "debounce", "concurrency"],
)
async def test_a_blocked_key_keeps_no_other_waiting(rig: Rig, policies: list[Policy]) -> None:
    """However many of its messages are older than those of the others."""
    if isinstance(policies[0], Debounce):
        # Bursts that have ended: one message of each waits.
        for n in range(3):
            await backlog(rig, 1, 90 - n, key="a")
    else:
        await backlog(rig, MANY, 90, key="a")
    process = Process(rig, policies)
    assert len(await claimed(process)) == 1
    others = {(await rig.put(1, key=key))[0] for key in ("b", "c", "d")}
    [free] = await rig.put(1)
    found: set[int] = set()
    for _ in range(20):
        found |= set(await claimed(process))
        if found >= {*others, free}:
            break
    assert found == {*others, free}


async def test_keys_are_read_when_they_have_a_slot(held: Rig, clock: Clock) -> None:
    """Behind a key with more messages than a claim looks at, the others go on at their rate."""
    await backlog(held, MANY, 90, key="large")
    for key in ("b", "c"):
        await backlog(held, 3, 60, key=key)
    process = Process(held, [Throttle(2, per="1s", key=True)])
    found = Counter[str | None]()
    for _ in range(10):
        found.update(row.key for row in (await process.claim()).rows)
        if found["b"] + found["c"] == 6:
            break
        await clock.set(clock.now + MICROSECONDS // 2 + MILLISECOND)
    assert found["b"] == found["c"] == 3
    assert found["large"] <= 12


@pytest.mark.usefixtures("gone")
async def test_another_rate_holds_for_what_waits_behind_a_blocked_key(rig: Rig) -> None:
    """The times by which keys are read are those of the old rate; the first claim asks anew."""
    await backlog(rig, MANY, 90, key="a")
    waiting = await backlog(rig, 4, 60, key="b")
    slow = Process(rig, [HOURLY])
    found: list[int] = []
    for _ in range(10):
        found += await claimed(slow)
    assert len(found) == 2
    assert found[1] == waiting[0]
    quick = Process(rig, [Throttle(4, per="1h", key=True)])
    again: set[int] = set()
    for _ in range(10):
        again |= set(await claimed(quick, 1))
    assert set(waiting[1:]) & again
