"""One look for all who rest, over a store that answers when it is told to."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import Around, ReadyPair, ReadyPairs
from faststream_sqlbroker.exceptions import AccessError, TransientStoreError
from faststream_sqlbroker.flow.heartbeat import Heartbeat
from faststream_sqlbroker.flow.lookout import LONGEST_TRUST, Lookout
from faststream_sqlbroker.flow.registration import Registration
from faststream_sqlbroker.subscriber.options import make_settings
from tests.clock import VirtualTime
from tests.unit.test_inflight import quiet


class Member:
    """A subscriber that says whether it rests."""

    longest_rest = 1.0

    def __init__(self, *queues: str, paused: Sequence[str] = ()) -> None:
        self.open: Sequence[str] = queues
        self.all_queues = (*queues, *paused)
        self.rests = True
        self.seen = list[list[str]]()

    def saw(self, found: ReadyPairs) -> None:
        self.seen.append(sorted(pair.queue for pair in found))


class Store:
    """Finds a pair in each queue."""

    def __init__(self) -> None:
        self.looks = list[tuple[list[str], list[str], bool]]()
        self.searches = list[list[str]]()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.lease_ends = 7.0
        self.error: Exception | None = None
        self.refuses_signs = False

    async def look_around(self, queues: Any, leased: Any, sign: Any = None) -> Around:
        self.looks.append((list(queues), list(leased), sign is not None))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        if sign is not None and self.refuses_signs:
            raise AccessError("no right to the table of states")
        found = ReadyPairs(ReadyPair(queue, 0, 0.0) for queue in queues)
        found.took = 0.4
        return Around(found, self.lease_ends, None if sign is None else frozenset(("paused",)))

    async def lease_ends_in(self, queues: Any) -> float:
        self.searches.append(list(queues))
        return self.lease_ends

    @property
    def live_subscribers(self) -> Any:
        return self

    async def announce(self, *_: Any, **__: Any) -> frozenset[str]:
        return frozenset()

    async def leave(self, _names: Any) -> None: ...

    async def living(self) -> list[Any]:
        return []


@pytest.fixture
def store() -> Any:
    return Store()


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


def lookout(store: Any, time: VirtualTime, *members: Any, heartbeat: Any = None) -> Lookout:
    made = Lookout(store, Clock(time), heartbeat)
    for member in members:
        made.join(member)
    return made


async def test_a_look_is_for_all_who_rest(store: Any, time: VirtualTime) -> None:
    ours, resting, busy = Member("a", "b"), Member("b", "c", paused="p"), Member("d")
    busy.rests = False
    gone = Member("e")
    looking = lookout(store, time, ours, resting, busy, gone)
    looking.leave(gone)
    found = await looking.look(ours)
    assert {pair.queue for pair in found} == {"a", "b"}
    assert found.took == 0.2, "each has a part in what it took"
    assert (resting.seen, busy.seen, gone.seen) == ([["b", "c"]], [], [])
    [(queues, leased, _)] = store.looks
    assert (sorted(queues), sorted(leased)) == (["a", "b", "c"], ["a", "b", "c", "d", "p"])


async def test_what_was_woken_or_reopened_in_that_time_looks_for_itself(
    store: Any, time: VirtualTime
) -> None:
    ours, woken, reopened, left, other = (Member(name) for name in "abcde")
    looking = lookout(store, time, ours, woken, reopened, left, other)
    store.may_answer.clear()
    look = asyncio.create_task(looking.look(ours))
    while not store.looks:
        await asyncio.sleep(0)
    assert looking.looks_for(woken)
    assert looking.looks_for(reopened)
    woken.rests = False
    reopened.open = ("c", "new")
    looking.leave(left)
    assert not looking.looks_for(reopened)
    assert not looking.looks_for(left)
    store.may_answer.set()
    await look
    assert [one.seen for one in (woken, reopened, left, other)] == [[], [], [], [["e"]]]
    assert not looking.looks_for(other), "it has ended"


async def test_a_look_that_hangs_or_fails_is_no_excuse(store: Any, time: VirtualTime) -> None:
    ours, other = Member("a"), Member("b")
    looking = lookout(store, time, ours, other)
    store.may_answer.clear()
    look = asyncio.create_task(looking.look(ours))
    while not store.looks:
        await asyncio.sleep(0)
    await time.advance(1.01)
    assert not looking.looks_for(other)
    store.error = TransientStoreError("down")
    store.may_answer.set()
    with pytest.raises(TransientStoreError):
        await look
    assert other.seen == []


async def test_the_end_of_a_lease_is_known_from_the_last_look(
    store: Any, time: VirtualTime
) -> None:
    ours, other = Member("a"), Member("b")
    looking = lookout(store, time, ours, other)
    await looking.look(ours)
    await time.advance(2.0)
    assert await looking.lease_ends_in(["a", "b"]) == 5.0
    assert store.searches == []
    assert await looking.lease_ends_in(["b", "z"]) == 7.0, "a queue was not looked at"
    await time.advance(LONGEST_TRUST - 1.0)
    assert await looking.lease_ends_in(["a"]) == 3.0, "asked for all at once"
    await time.advance(1.01)
    assert await looking.lease_ends_in(["a"]) == 7.0
    looking.released()
    assert await looking.lease_ends_in(["a"]) == 7.0
    searches = [sorted(queues) for queues in store.searches]
    assert searches == [["a", "b", "z"], ["a", "b"], ["a", "b"]]


async def test_signs_of_life_ride_on_looks_that_do_not_depend_on_them(
    store: Any, time: VirtualTime
) -> None:
    clock = Clock(time)
    registration = Registration(
        make_settings("a", {}), paused=False, on_change=lambda: None, clock=clock
    )
    registration.begin(known=True)
    heartbeat = Heartbeat(store, quiet, 5.0, clock=clock)
    ours = Member("a")
    looking = lookout(store, time, ours, heartbeat=heartbeat)
    await looking.look(ours)
    assert not store.looks[-1][2], "nothing has joined"
    heartbeat.join(registration)
    await heartbeat.tick()
    for _ in range(12):
        await time.advance(1.0)
        await looking.look(ours)
    alive = [n for n, (_, _, sign) in enumerate(store.looks) if sign]
    assert alive == [5, 10]
    assert registration.keeps_closed, "a look tells what is paused"
    store.refuses_signs = True
    await time.advance(4.0)
    await looking.look(ours)
    assert [sign for _, _, sign in store.looks[-2:]] == [True, False]
    await looking.look(ours)
    assert not store.looks[-1][2], "the loop of the heartbeat tries, and tells of its failure"
    await heartbeat.leave(registration)
