"""Gauges: what a process holds, and which process of the fleet reads the queues."""

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.metrics import (
    DELAYED,
    FINDINGS,
    FLEET_GAUGES,
    HEALTHY,
    HELD,
    METRICS,
    POOL_LIMIT,
    POOL_USED,
    READY,
    STANDBY,
    STANDBY_OVERDUE,
    Kind,
    QueueState,
)
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.fleet.sampling import LOCK, SLOW_SHARE, Sampler
from tests.flow.conftest import Rig
from tests.helpers import eventually
from tests.unit.test_metrics import Kept

LONG = 200.0
"""Seconds between two looks: who looks has the lock for three times as long."""
STAGES = {"waiting": 1, "running": 2, "settling": 3}


class Process:
    """One of the fleet, with one subscriber."""

    def __init__(self, rig: Rig, *, subscribers: int = 1) -> None:
        self.kept = Kept()
        self.kept.sample_interval = LONG
        self.told: list[tuple[int, str]] = []
        self.problem: str | None = None
        self.clock = Clock()
        self.looks = 0
        self.takes = 0.0
        self.failure: StoreError | None = None
        consumer: Any = SimpleNamespace(
            healthy=True, inflight=SimpleNamespace(count_stages=lambda: STAGES)
        )
        self.sampler = Sampler(
            rig.store,
            self.kept,
            lambda level, text, **_: self.told.append((level, text)),
            self.clock,
            lambda: [(("a", "b"), consumer)] * subscribers,
            self._find,
            self.write_problem,
        )

    async def _find(self) -> Mapping[tuple[str, ...], float]:
        self.looks += 1
        if self.takes:
            now = self.clock.monotonic() + self.takes
            self.clock.monotonic = lambda: now
        if self.failure is not None:
            raise self.failure
        return {("late", "error", "a"): 1.0}

    async def write_problem(self) -> str | None:
        return self.problem

    @property
    def tells(self) -> bool:
        """Whether it exports what is in the queues."""
        assert len({bool(self.kept.gauges[metric.name]) for metric in FLEET_GAUGES}) == 1
        return bool(self.kept.gauges[READY.name])


async def put(rig: Rig, count: int, **options: Any) -> None:
    from faststream_sqlbroker.core.rows import NewMessage

    await rig.store.insert([NewMessage("a", b"", **options) for _ in range(count)])


async def test_one_process_reads_the_queues(rig: Rig) -> None:
    await put(rig, 3)
    await put(rig, 2, delay=600.0)
    first, second = Process(rig), Process(rig)
    for _ in range(2):
        await first.sampler.tick()
        await second.sampler.tick()
        assert (first.tells, second.tells) == (True, False)
    assert first.kept.gauges[READY.name] == {("a",): 3}
    assert first.kept.gauges[DELAYED.name] == {("a",): 2}
    assert first.kept.gauges[FINDINGS.name] == {("late", "error", "a"): 1.0}
    assert (first.looks, second.looks) == (1, 0), "once a minute"
    [held] = await rig.store.locks.list_held(10)
    assert held.key == LOCK
    # Both tell of themselves.
    for process in (first, second):
        assert process.kept.gauges[HEALTHY.name] == {("a,b",): 1.0}
        assert process.kept.gauges[HELD.name] == {("a,b", stage): n for stage, n in STAGES.items()}


async def test_the_next_process_reads_when_the_first_has_stopped(rig: Rig) -> None:
    await put(rig, 1)
    first, second = Process(rig), Process(rig)
    first.sampler.start(rig.wakeups.outages)
    await eventually(lambda: _is(lambda: READY.name in first.kept.gauges and first.tells))
    await second.sampler.tick()
    assert not second.tells
    await first.sampler.stop()
    gauges = {metric.name for metric in METRICS if metric.kind is Kind.GAUGE}
    assert first.kept.gauges.keys() == gauges
    assert not any(first.kept.gauges.values()), "nothing of it is exported any more"
    await second.sampler.tick()
    assert second.tells
    await first.sampler.stop()  # without effect


async def _is(condition: Any) -> bool:
    return bool(condition())


async def test_the_next_process_reads_when_the_first_has_died(rig: Rig) -> None:
    await put(rig, 1)
    dead, second = Process(rig), Process(rig)
    dead.kept.sample_interval = 0.05
    await dead.sampler.tick()
    assert dead.tells

    async def taken_over() -> bool:
        await second.sampler.tick()
        return second.tells

    await eventually(taken_over)
    dead.sampler._sample_at = 0.0
    await dead.sampler.tick()
    assert not dead.tells, "back again, it asks first"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_failed_look_leaves_no_old_values(rig: Rig) -> None:
    await put(rig, 1)
    process = Process(rig)
    await process.sampler.tick()
    assert process.tells
    process.sampler._sample_at = 0.0
    with patch.object(rig.store.queue_states, "read_all", side_effect=StoreError("gone")):
        assert await process.sampler.tick() == LONG
    assert not process.tells
    assert [level for level, _ in process.told] == [logging.WARNING]
    await process.sampler.tick()
    assert process.tells


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_stands_by_unseen_is_in_the_log_once(rig: Rig) -> None:
    """And again after claims have looked at it."""
    process = Process(rig)
    for late, warnings in ((500.0, 0), (700.0, 1), (800.0, 1), (0.0, 1), (900.0, 2)):
        state = QueueState("a", 0, 0, 0, 0.0, 0, standing=3, standing_overdue=late)
        process.sampler._sample_at = 0.0
        with patch.object(rig.store.queue_states, "read_all", return_value=[state]):
            await process.sampler.tick()
        assert process.kept.gauges[STANDBY.name] == {("a",): 3.0}
        assert process.kept.gauges[STANDBY_OVERDUE.name] == {("a",): late}
        assert len(process.told) == warnings
    level, text = process.told[0]
    assert level == logging.WARNING
    assert "3 messages of queue 'a' stand by" in text
    assert "700 s" in text


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_slow_look_is_followed_by_a_longer_pause(rig: Rig) -> None:
    await put(rig, 1)
    process = Process(rig)
    now = 100.0
    process.clock.monotonic = lambda: now
    looks = 0
    read = rig.store.queue_states.read_all

    async def slow() -> Any:
        nonlocal now, looks
        now += 2.0
        looks += 1
        return await read()

    with patch.object(rig.store.queue_states, "read_all", slow):
        await process.sampler.tick()
        for _ in range(3):
            now += 5.0
            await process.sampler.tick()
        assert looks == 1
        assert process.tells, "what was found stays until the next look"
        now += SLOW_SHARE * 2.0
        await process.sampler.tick()
    assert looks == 2


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_findings_take_nothing_from_the_other_gauges(rig: Rig) -> None:
    """Neither a failure of theirs nor the time that they take, which both have pauses of their
    own.
    """
    await put(rig, 1)
    process = Process(rig)
    process.clock.monotonic = lambda: 100.0
    process.takes = 10.0

    async def tick_at(now: float) -> tuple[int, bool, bool]:
        process.clock.monotonic = lambda: now
        await process.sampler.tick()
        gauges = process.kept.gauges
        return process.looks, bool(gauges[READY.name]), bool(gauges[FINDINGS.name])

    assert await tick_at(100.0) == (1, True, True)
    assert process.sampler._pause == 0.0, "counting took no time"
    process.failure = StoreError("refused")
    assert await tick_at(300.0) == (1, True, True), "they took 10 s"
    assert await tick_at(311.0) == (2, True, False)
    assert await tick_at(500.0) == (2, True, False), "nor is a failure repeated at each look"
    assert await tick_at(600.0) == (3, True, False)
    assert [text for _, text in process.told] == [
        "could not search for findings for metrics, trying again soon: refused"
    ]
    process.failure = None
    assert await tick_at(900.0) == (4, True, True)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_process_without_subscribers_asks_nothing(rig: Rig) -> None:
    process = Process(rig, subscribers=0)
    with patch.object(rig.store.locks, "acquire", side_effect=AssertionError):
        await process.sampler.tick()
    assert not process.tells
    assert process.kept.gauges[POOL_USED.name] == {("sqlite",): 0.0}
    assert process.kept.gauges[POOL_LIMIT.name] == {("sqlite",): 15.0}
