"""The time of a broker: one clock, which reaches all its parts."""

import asyncio
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import BlockingWait, Concurrency, Once
from faststream_sqlbroker.exceptions import LockNotAcquiredError
from tests.clock import VirtualTime
from tests.faststream.conftest import QUICK, Look

CONTAINERS = (list, tuple, set, frozenset, deque)


def parts(of: Any) -> Iterator[Any]:
    """What `of` holds, as far as it may lead to parts of the broker."""
    if isinstance(of, dict):
        yield from of.values()
    elif isinstance(of, CONTAINERS):
        yield from of
    elif isinstance(of, partial):
        yield from (of.func, of.args, of.keywords)
    elif isinstance(of, types.MethodType):
        yield of.__self__
    elif isinstance(of, types.FunctionType):
        yield from (cell.cell_contents for cell in of.__closure__ or () if has_contents(cell))
    elif isinstance(of, asyncio.Task):
        coroutine: Any = of.get_coro()
        while coroutine is not None and (frame := getattr(coroutine, "cr_frame", None)):
            yield dict(frame.f_locals)
            coroutine = coroutine.cr_await
    elif type(of).__module__.startswith("faststream_sqlbroker"):
        yield getattr(of, "__dict__", {})
        for slot in (slot for each in type(of).__mro__ for slot in getattr(each, "__slots__", ())):
            yield getattr(of, slot, None)


def has_contents(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True


def clocks(broker: SqlBroker) -> tuple[list[Clock], set[str]]:
    """The clocks of all parts of `broker`, and the names of the parts' classes."""
    found = list[Clock]()
    seen = dict[int, Any]()
    names = set[str]()
    waiting: list[Any] = [broker]
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, type | types.ModuleType):
            continue
        seen[id(part)] = part
        names.add(type(part).__name__)
        if isinstance(part, Clock):
            found.append(part)
        else:
            waiting += parts(part)
    return found, names


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transactional": True},
        {"policies": [Once("1h"), BlockingWait("1s")]},
        {"policies": [Concurrency(1)]},
        {"batch": True},
        {"handler_timeout": "1m"},
        {"ordered": True},
    ],
    ids=str,
)
async def test_all_parts_have_the_clock_of_their_broker(
    broker: SqlBroker, options: dict[str, Any]
) -> None:
    @broker.subscriber("q", **QUICK, **options)
    async def handle(_body: Any) -> None: ...

    broker.publish_on_schedule("s", "0 0 1 1 *", "q")
    await broker.start()
    async with broker.lock("k"):  # its locks are made when one is taken
        pass
    found, names = clocks(broker)
    assert found == [broker._clock]
    expected = {
        *("Store", "Database", "Wakeups", "Outages", "Heartbeat", "Destinations", "Rights"),
        *(
            "Scheduler",
            "ScheduleRunner",
            "LockManager",
            "DirectClaimer",
            "Registration",
            "QueueConsumer",
            "Inflight",
        ),
        *(
            "HandlerTimes",
            "Fetcher",
            "ReadyTracker",
            "Flusher",
            "QuarantineWriter",
            "LeaseKeeper",
            "Loop",
        ),
        *("StuckReleaser", "Worker", "Settlements"),
    }
    assert expected - names == set(), "not reached"


async def test_a_handler_runs_into_its_time_limit_of_an_hour(broker: SqlBroker, look: Look) -> None:
    broker._clock.use(time := VirtualTime())
    started = asyncio.Event()

    @broker.subscriber("q", handler_timeout="1h", retry_strategy=None)
    async def handle(_body: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    async def until(done: Callable[[], bool], step: float) -> None:
        while not done():
            await time.advance(step)
            await asyncio.sleep(0.001)  # the database takes real time

    await broker.publish("x", "q")
    await broker.start()
    async with asyncio.timeout(60):
        await until(started.is_set, 0.01)
        await time.advance(3_600.0)
        archived = asyncio.create_task(look.archived())
        await until(archived.done, 0.01)
        [row] = await archived
        assert (row["state"], row["attempts_count"]) == ("FAILED", 1)
        assert "TimeoutError" in row["last_error"]


async def test_a_lock_is_waited_for_an_hour(broker: SqlBroker) -> None:
    broker._clock.use(time := VirtualTime())

    async def wait() -> None:
        async with broker.lock("k", wait="1h"):
            pass

    async with broker.lock("k", lease="10h"):
        waiting = asyncio.create_task(wait())
        async with asyncio.timeout(60):
            while not waiting.done():
                await time.advance(60.0)
                await asyncio.sleep(0.001)
        with pytest.raises(LockNotAcquiredError, match="within 3600"):
            await waiting
    assert time.now >= 1_000.0 + 3_600.0
