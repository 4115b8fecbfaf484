"""Failures of many loops are logged in two lines."""

import asyncio
import logging
import re
import time
from contextlib import suppress
from typing import Any
from unittest.mock import AsyncMock
from uuid import uuid4

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import Settlement
from faststream_sqlbroker.database.errors import NotConnectedError
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_writer import QuarantineWriter
from faststream_sqlbroker.flow.loop import LAST_BACKOFF, MIN_OUTAGE, Loop, Outages, is_logged
from tests.clock import VirtualTime

HOUR = 3_600.0


class Said:
    """The lines of the log."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def __call__(self, level: int, text: str, **_: Any) -> None:
        self.lines.append((level, text))


def test_an_outage_of_all_loops_is_two_lines_with_the_counts() -> None:
    said = Said()
    outages = Outages(said)
    for loop, name in (
        (1, "fetch loop"),
        (2, "fetch loop"),
        (3, "heartbeat loop"),
        (1, "fetch loop"),
    ):
        outages.record_failure(loop, name, NotConnectedError("refused"))
    [(level, text)] = said.lines
    assert level == logging.ERROR
    assert text.startswith("the fetch loop failed")
    assert text.endswith(": refused")
    outages.record_success(1)
    outages.record_success(2)
    assert len(said.lines) == 1
    outages.record_success(3)
    outages.record_success(3)
    [_, (level, text)] = said.lines
    assert level == logging.WARNING
    numbers = (
        r"the database works again, after \d+\.\d s: 4 failures \(fetch loop 3, heartbeat loop 1\)"
    )
    assert re.fullmatch(numbers, text), text


def test_the_next_outage_is_logged_again() -> None:
    said = Said()
    outages = Outages(said)
    for _ in range(2):
        outages.record_failure(1, "fetch loop", TransientStoreError("busy"))
        outages.record_success(1)
    assert [level for level, _ in said.lines] == [logging.WARNING] * 4
    assert said.lines[1][1].endswith(": 1 failure (fetch loop 1)")


def test_refusals_are_logged_for_each_kind_of_loop_and_hide_no_outage() -> None:
    said = Said()
    outages = Outages(said)
    for loop in (1, 2):
        outages.record_failure(loop, "heartbeat loop", StoreError("no such table"))
    outages.record_failure(3, "fetch loop", NotConnectedError("refused"))
    outages.record_failure(1, "heartbeat loop", NotConnectedError("refused"))
    assert [text.partition(" failed")[0] for _, text in said.lines] == [
        "the heartbeat loop",
        "the fetch loop",
    ]
    outages.record_success(3)
    assert len(said.lines) == 2, "one loop is still cut off"
    outages.record_failure(1, "heartbeat loop", StoreError("no such table"))
    assert said.lines[2][1].startswith("the database works again")
    outages.record_success(1)
    outages.record_success(2)
    assert said.lines[3][1].startswith("the heartbeat loop works again, after")
    assert len(said.lines) == 4


def test_a_loop_that_stops_in_an_outage_does_not_end_it() -> None:
    said = Said()
    outages = Outages(said)
    outages.record_failure(1, "fetch loop", TransientStoreError("down"))
    outages.record_failure(2, "fetch loop", TransientStoreError("down"))
    outages.remove_part(1)
    outages.remove_part(1)
    assert len(said.lines) == 1
    outages.record_success(2)
    assert len(said.lines) == 2
    outages.record_failure(2, "fetch loop", TransientStoreError("down"))
    outages.remove_part(2)
    outages.record_success(2)
    numbers = (
        r"the fetch loop stopped before it worked again, after \d+\.\d s: "
        r"1 failure \(fetch loop 1\)"
    )
    assert re.fullmatch(numbers, said.lines[3][1]), said.lines[3]
    assert len(said.lines) == 4


def test_a_write_that_fails_while_other_loops_work_may_be_due_to_its_rows() -> None:
    outages = Outages(Said())
    outages.record_failure(1, "flush loop", TransientStoreError("locked"))
    assert not outages.is_general
    outages.record_failure(2, "fetch loop", TransientStoreError("down"))
    assert outages.is_general
    outages.record_success(2)
    assert not outages.is_general


async def test_in_an_outage_no_batch_is_named() -> None:
    """Its failures are not for its sake: they are among the counts."""
    said = Said()
    outages = Outages(said)
    inflight = Inflight(said)
    inflight.outages = outages
    repeater = QuarantineWriter(AsyncMock(), inflight, said)
    parts = [Settlement(1, uuid4(), None)]
    outages.record_failure(1, "fetch loop", TransientStoreError("down"))
    repeater.log_kept(parts, TransientStoreError("down"))
    assert len(said.lines) == 1
    repeater.log_kept(parts, StoreError("no"), "were refused by the database", logging.ERROR)
    assert len(said.lines) == 2
    outages.record_success(1)
    repeater.log_kept(parts, TransientStoreError("locked"))
    assert [text.partition(" (")[0] for _, text in said.lines[3:]] == [
        "the outcomes of 1 messages could not be written"
    ]


def test_repeated_failures_are_logged_ever_more_rarely() -> None:
    assert [n for n in range(1, 70) if is_logged(n)] == [1, 2, 4, 8, 16, 32, 64]


def test_a_try_that_began_before_the_end_opens_no_new_outage() -> None:
    """A statement that waited for a lock all the time fails just after another one got it."""
    said = Said()
    outages = Outages(said)
    began = time.monotonic()
    outages.record_failure(1, "heartbeat loop", TransientStoreError("locked"), began)
    outages.record_success(1)
    outages.record_failure(2, "release loop", TransientStoreError("locked"), began)
    assert len(said.lines) == 2
    outages.record_failure(2, "release loop", TransientStoreError("locked"), time.monotonic() + 0.1)
    assert len(said.lines) == 3


async def test_after_the_first_success_the_others_try_at_once() -> None:
    """Virtual time: a moment is the same for all, and pauses have their plain lengths."""
    source = VirtualTime()
    clock = Clock(source)
    said = Said()
    outages = Outages(said, clock)
    tries: list[tuple[int, float]] = []
    is_down = True

    def create_loop(number: int) -> Loop:
        async def tick() -> float:
            tries.append((number, clock.monotonic()))
            if is_down:
                raise NotConnectedError("refused")
            return HOUR

        return Loop(f"loop-{number}", tick, said, clock)

    loops = [create_loop(number) for number in range(4)]
    for loop in loops:
        loop.start(outages)
        await source.advance(0.7)  # each has its own moments
    waiting = asyncio.create_task(outages.pause(HOUR))
    await source.advance(60)
    assert len({at for _, at in tries[-4:]}) == 4
    is_down = False
    tries.clear()
    await source.advance(LAST_BACKOFF)
    assert sorted(number for number, _ in tries) == [0, 1, 2, 3]
    assert len({at for _, at in tries}) == 1, "the first of them succeeded at that moment"
    assert waiting.done()
    assert len(said.lines) == 2
    for loop in loops:
        await loop.stop()


async def test_a_try_from_before_the_first_success_is_repeated_at_once() -> None:
    """It had hung since the outage; only the next failure makes a pause."""
    source = VirtualTime()
    clock = Clock(source)
    outages = Outages(Said(), clock)
    started_at = clock.monotonic()
    outages.record_failure(1, "fetch loop", NotConnectedError("refused"))
    await source.advance(5)
    outages.record_success(1)
    await outages.pause(HOUR, started_at)
    await source.advance(1)
    pause = asyncio.create_task(outages.pause(HOUR, clock.monotonic()))
    await source.advance(HOUR - 1)
    assert not pause.done()
    await source.advance(1)
    assert pause.done()


async def test_a_write_that_succeeds_while_other_loops_work_ends_no_pause() -> None:
    """Another write, which fails due to its rows, would be repeated without a pause."""
    source = VirtualTime()
    clock = Clock(source)
    outages = Outages(Said(), clock)
    for part, name in enumerate(("flush loop", "repeat loop")):
        outages.record_failure(part, name, TransientStoreError("locked"))
    pause = asyncio.create_task(outages.pause(HOUR))
    await source.advance(1)
    outages.record_success(0)
    await source.advance(1)
    assert not pause.done()
    await source.advance(HOUR)
    assert pause.done()


async def test_a_partial_outage_leaves_the_pauses_of_others() -> None:
    """A part that works now and then, as with too many connections, ends them only now and then."""
    source = VirtualTime()
    clock = Clock(source)
    outages = Outages(Said(), clock)
    tries = 0

    async def fail() -> float:
        nonlocal tries
        tries += 1
        raise NotConnectedError("too many connections")

    loop = Loop("failing", fail, Said(), clock)
    loop.start(outages)
    for _ in range(600):
        outages.record_failure(1, "fetch loop", NotConnectedError("too many connections"))
        await source.advance(0.1)
        outages.record_success(1)
    await loop.stop()
    assert 6 <= tries <= 30


async def test_a_part_with_nothing_to_ask_ends_no_pause() -> None:
    """Else it would end them while the database is down, and its return would end them no more."""
    source = VirtualTime()
    clock = Clock(source)
    answers = 0
    outages = Outages(Said(), clock, lambda: answers)
    is_down = True
    tries = 0

    async def ask() -> float:
        nonlocal answers, tries
        tries += 1
        if is_down:
            raise NotConnectedError("refused")
        answers += 1
        return HOUR

    async def ask_at_first() -> float:
        if not outages.is_general:
            raise NotConnectedError("refused")
        return HOUR

    asking, idle = (Loop("loop", tick, Said(), clock) for tick in (ask, ask_at_first))
    idle.start(outages)
    asking.start(outages)
    await source.advance(1)
    assert (idle.healthy, asking.healthy) == (True, False)
    assert tries == 4, "the growing pauses of one loop"
    is_down = False
    pause = asyncio.create_task(outages.pause(HOUR))
    await source.advance(LAST_BACKOFF)
    assert pause.done()
    for loop in (asking, idle):
        await loop.stop()


async def test_a_short_failure_leaves_the_end_of_the_next_outage() -> None:
    source = VirtualTime()
    clock = Clock(source)
    outages = Outages(Said(), clock)
    for seconds in (0.1, MIN_OUTAGE):
        outages.record_failure(1, "fetch loop", TransientStoreError("refused"))
        await source.advance(seconds)
        pause = asyncio.create_task(outages.pause(HOUR))
        await source.advance(0)
        outages.record_success(1)
        await source.advance(0.1)
        assert pause.done()


async def test_a_pause_of_a_closed_event_loop_disturbs_no_other() -> None:
    outages = Outages(Said())
    other_loop = asyncio.new_event_loop()
    orphan = other_loop.create_task(outages.pause(HOUR))
    await asyncio.to_thread(other_loop.run_until_complete, asyncio.sleep(0))
    other_loop.close()
    outages.record_failure(1, "fetch loop", NotConnectedError("refused"))
    outages.record_success(1)
    assert not orphan.done()
    with suppress(RuntimeError):
        orphan.get_coro().close()  # type: ignore[union-attr] # it was never run to its end
