"""The clock of a broker, with virtual time behind it."""

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.deliver.leases import StuckReleaser
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import SharedPoller
from faststream_sqlbroker.flow.loop import FIRST_BACKOFF, LAST_BACKOFF, Loop, Outages, backoff
from tests.clock import VirtualTime

HOUR = 3_600.0


class Said:
    """What the log was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def __call__(self, level: int, text: str, **_: Any) -> None:
        self.lines.append((level, text))


class Database:
    """A store without expired leases, which counts what is removed."""

    def __init__(self) -> None:
        self.searches = 0
        self.removals = 0
        self.dead_sessions = self

    async def get_seconds_to_lease_end(self, _queues: Sequence[str]) -> float | None:
        self.searches += 1
        return None

    async def end_dead_sessions(self) -> list[int]:
        return []

    async def remove_expired_states(self, _limit: int) -> int:
        self.removals += 1
        return 0


async def test_a_loop_backs_off_for_an_hour_in_no_time() -> None:
    at = list[float]()
    said = Said()
    source = VirtualTime()
    clock = Clock(source)

    async def tick() -> float:
        at.append(clock.monotonic())
        raise TransientStoreError("down")

    loop = Loop("test", tick, said, clock)
    loop.start(Outages(said, clock))
    async with asyncio.timeout(60):  # virtual time waits for nothing
        await source.advance(HOUR)
    pauses = [later - sooner for sooner, later in pairwise(at)]
    assert pauses[:8] == pytest.approx([FIRST_BACKOFF * 2**n for n in range(7)] + [LAST_BACKOFF])
    assert set(map(round, pauses[8:])) == {round(LAST_BACKOFF)}
    assert sum(pauses) > HOUR - 2 * LAST_BACKOFF
    assert loop.failures == len(at) > 300
    await loop.stop(5)
    level, text = said.lines[-1]
    assert level == logging.WARNING
    assert f"after {HOUR:.1f} s" in text


async def test_what_is_over_is_removed_once_an_interval() -> None:
    source = VirtualTime()
    said = Said()
    store = Database()
    clock = Clock(source)
    lookout = SharedPoller(store, clock)  # type: ignore[arg-type]
    housekeeping = Housekeeping(store, said, clock)  # type: ignore[arg-type]
    releaser = StuckReleaser(
        store,  # type: ignore[arg-type]
        ["q"],
        said,
        interval=60.0,
        on_released=lambda: None,
        poller=lookout,
        housekeeping=housekeeping,
    )
    loop = Loop("release-stuck", releaser.tick, said, clock)
    loop.start(Outages(said, clock))
    await source.advance(HOUR)
    assert store.removals == 61
    assert store.searches >= store.removals
    assert loop.healthy
    await loop.stop(5)


async def test_a_time_limit_ends_when_its_virtual_time_is_over() -> None:
    source = VirtualTime()
    over = list[float]()
    clock = Clock(source)

    async def wait(seconds: float | None) -> None:
        try:
            async with clock.timeout_at(None if seconds is None else clock.monotonic() + seconds):
                await asyncio.Event().wait()
        except TimeoutError:
            over.append(clock.monotonic() - 1_000.0)

    tasks = [asyncio.create_task(wait(seconds)) for seconds in (60.0, HOUR, -1.0, None)]
    await source.advance(HOUR - 1)
    assert over == [0.0, 60.0]
    await source.advance(1)
    assert over == [0.0, 60.0, HOUR]
    assert not tasks[-1].done(), "None is without limit"
    tasks[-1].cancel()
    await asyncio.wait(tasks)


async def test_a_cancelled_timer_does_not_fire() -> None:
    source = VirtualTime()
    fired = list[str]()
    clock = Clock(source)
    clock.call_later(2, fired.append, "second")
    clock.call_later(1, fired.append, "first")
    clock.call_later(1.5, fired.append, "cancelled").cancel()
    await source.advance(1.9)
    assert fired == ["first"]
    await source.advance(HOUR)
    assert fired == ["first", "second"]


async def test_real_time_is_what_a_clock_has_by_itself() -> None:
    clock = Clock()
    fired = asyncio.Event()
    before = time.monotonic()
    clock.call_later(0.01, fired.set)
    async with clock.timeout(600):
        await fired.wait()
    await clock.sleep(0.01)
    assert before + 0.019 < clock.monotonic() <= time.monotonic()
    with pytest.raises(TimeoutError):
        async with clock.timeout_at(clock.monotonic() - 1):
            await asyncio.Event().wait()


def test_pauses_are_of_different_lengths_by_chance() -> None:
    pauses = [backoff(1, Clock()) for _ in range(200)]
    assert all(0.5 * FIRST_BACKOFF <= pause <= 1.5 * FIRST_BACKOFF for pause in pauses)
    assert max(pauses) > 1.2 * FIRST_BACKOFF
    assert min(pauses) < 0.8 * FIRST_BACKOFF
