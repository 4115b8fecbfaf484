"""One look for all who rest, over a store that answers when it is told to."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.orders import OperatorRequests
from faststream_sqlbroker.core.rows import PollResult, ReadyPair, ReadyPairs
from faststream_sqlbroker.exceptions import AccessError, TransientStoreError
from faststream_sqlbroker.flow.fleet.heartbeat import Heartbeat
from faststream_sqlbroker.flow.fleet.lookout import MAX_LEASE_INFO_AGE, SharedPoller
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.subscriber.options import make_settings
from tests.clock import VirtualTime
from tests.unit.test_inflight import quiet


class Member:
    """A subscriber that says whether it is_idle."""

    max_poll_interval = 1.0
    polled_at = float("-inf")

    def __init__(self, *queues: str, paused: Sequence[str] = ()) -> None:
        self.open_queues: Sequence[str] = queues
        self.all_queues = (*queues, *paused)
        self.is_idle = True
        self.seen = list[list[str]]()

    def on_poll_result(self, found: ReadyPairs) -> None:
        self.seen.append(sorted(pair.queue for pair in found))


class Store:
    """Finds a pair in each queue."""

    def __init__(self) -> None:
        self.looks = list[tuple[list[str], list[str], bool]]()
        self.searches = list[list[str]]()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.lease_ends: float | None = 7.0
        self.error: Exception | None = None
        self.refuses_signs = False

    async def poll_all(self, queues: Any, leased: Any, sign: Any = None) -> PollResult:
        self.looks.append((list(queues), list(leased), sign is not None))
        lease_ends = self.lease_ends
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        if sign is not None and self.refuses_signs:
            raise AccessError("no right to the table of states")
        found = ReadyPairs(ReadyPair(queue, 0, 0.0) for queue in queues)
        found.duration = 0.4
        return PollResult(
            found, lease_ends, None if sign is None else OperatorRequests(frozenset(("paused",)))
        )

    async def get_seconds_to_lease_end(self, queues: Any) -> float | None:
        self.searches.append(list(queues))
        return self.lease_ends

    @property
    def live_subscribers(self) -> Any:
        return self

    async def write_heartbeat(self, *_: Any, **__: Any) -> OperatorRequests:
        return OperatorRequests()

    async def remove(self, _names: Any) -> None: ...

    async def list_live(self) -> list[Any]:
        return []


@pytest.fixture
def store() -> Any:
    return Store()


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


def lookout(store: Any, time: VirtualTime, *members: Any, heartbeat: Any = None) -> SharedPoller:
    made = SharedPoller(store, Clock(time), heartbeat)
    for member in members:
        made.join(member)
    return made


async def test_a_look_is_for_all_who_rest(store: Any, time: VirtualTime) -> None:
    ours, resting, busy = Member("a", "b"), Member("b", "c", paused="p"), Member("d")
    busy.is_idle = False
    gone = Member("e")
    looking = lookout(store, time, ours, resting, busy, gone)
    looking.leave(gone)
    found = await looking.poll_for(ours)
    assert {pair.queue for pair in found} == {"a", "b"}
    assert found.duration == 0.2, "each has a part in what it took"
    assert (resting.seen, busy.seen, gone.seen) == ([["b", "c"]], [], [])
    [(queues, leased, _)] = store.looks
    assert (sorted(queues), sorted(leased)) == (["a", "b", "c"], ["a", "b", "c", "d", "p"])


async def test_what_was_woken_or_reopened_in_that_time_looks_for_itself(
    store: Any, time: VirtualTime
) -> None:
    ours, woken, reopened, left, other = (Member(name) for name in "abcde")
    looking = lookout(store, time, ours, woken, reopened, left, other)
    store.may_answer.clear()
    look = asyncio.create_task(looking.poll_for(ours))
    while not store.looks:
        await asyncio.sleep(0)
    assert looking.is_polling_for(woken)
    assert looking.is_polling_for(reopened)
    woken.is_idle = False
    reopened.open_queues = ("c", "new")
    looking.leave(left)
    assert not looking.is_polling_for(reopened)
    assert not looking.is_polling_for(left)
    store.may_answer.set()
    await look
    assert [one.seen for one in (woken, reopened, left, other)] == [[], [], [], [["e"]]]
    assert not looking.is_polling_for(other), "it has ended"


async def test_a_look_that_hangs_or_fails_is_no_excuse(store: Any, time: VirtualTime) -> None:
    ours, other = Member("a"), Member("b")
    looking = lookout(store, time, ours, other)
    store.may_answer.clear()
    look = asyncio.create_task(looking.poll_for(ours))
    while not store.looks:
        await asyncio.sleep(0)
    await time.advance(1.01)
    assert not looking.is_polling_for(other)
    store.error = TransientStoreError("down")
    store.may_answer.set()
    with pytest.raises(TransientStoreError):
        await look
    assert other.seen == []


async def held_up(store: Any, looking: SharedPoller, asking: Member) -> "asyncio.Task[ReadyPairs]":
    """A look whose answer waits until the event, which is returned to the store, is set."""
    store.may_answer = asyncio.Event()
    count = len(store.looks)
    look = asyncio.create_task(looking.poll_for(asking))
    while len(store.looks) == count:
        await asyncio.sleep(0)
    return look


async def test_who_has_looked_since_is_not_told_what_an_older_look_found(
    store: Any, time: VirtualTime
) -> None:
    slow, quick, woken, resting = (Member(name) for name in "abcd")
    looking = lookout(store, time, slow, quick, woken, resting)
    older = await held_up(store, looking, slow)
    slow.is_idle = False
    answer_older = store.may_answer
    await time.advance(0.1)
    # It looks for itself, and is_idle again before the older look has its answer.
    store.may_answer = asyncio.Event()
    store.may_answer.set()
    woken.is_idle = False
    await looking.poll_for(woken)
    woken.is_idle, woken.polled_at = True, time.monotonic()
    await time.advance(0.1)
    newer = await held_up(store, looking, quick)
    quick.is_idle = False
    for one in (woken, resting):
        one.seen.clear()
    answer_older.set()
    await older
    assert (woken.seen, resting.seen) == ([], [["d"]])
    assert looking.is_polling_for(woken), "the newer look is still under way"
    store.may_answer.set()
    await newer
    assert woken.seen == [["c"]]


async def test_an_older_answer_does_not_hide_a_lease(store: Any, time: VirtualTime) -> None:
    ours, other = Member("a"), Member("b")
    looking = lookout(store, time, ours, other)
    store.lease_ends = None
    older = await held_up(store, looking, ours)
    await time.advance(0.1)
    store.lease_ends = 7.0
    assert await looking.lease_expires_in(["a", "b"]) == 7.0
    store.may_answer.set()
    await older
    await time.advance(2.0)
    assert await looking.lease_expires_in(["a", "b"], notify_only=True) == 5.0


@pytest.mark.parametrize("by", ["a look", "a search"])
async def test_who_is_told_of_leases_is_woken_when_there_are_some(
    by: str, store: Any, time: VirtualTime
) -> None:
    ours = Member("a")
    woken = list[str]()
    looking = SharedPoller(store, Clock(time))
    for name in ("a", "b"):
        looking.join(ours if name == "a" else Member("b"), lambda name=name: woken.append(name))
    store.lease_ends = None
    await looking.poll_for(ours)
    assert woken == []
    store.lease_ends = 7.0
    await time.advance(MAX_LEASE_INFO_AGE + 0.01)
    if by == "a look":
        await looking.poll_for(ours)
    else:
        await looking.lease_expires_in(["a"])
    assert woken == ["a", "b"]


async def test_the_end_of_a_lease_is_known_from_the_last_look(
    store: Any, time: VirtualTime
) -> None:
    ours, other = Member("a"), Member("b")
    looking = lookout(store, time, ours, other)
    await looking.poll_for(ours)
    await time.advance(2.0)
    assert await looking.lease_expires_in(["a", "b"]) == 5.0
    assert store.searches == []
    assert await looking.lease_expires_in(["b", "z"]) == 7.0, "a queue was not looked at"
    await time.advance(MAX_LEASE_INFO_AGE - 1.0)
    assert await looking.lease_expires_in(["a"]) == 3.0, "asked for all at once"
    await time.advance(1.01)
    assert await looking.lease_expires_in(["a"]) == 7.0
    looking.forget_leases()
    assert await looking.lease_expires_in(["a"]) == 7.0
    searches = [sorted(queues) for queues in store.searches]
    assert searches == [["a", "b", "z"], ["a", "b"], ["a", "b"]]


async def test_signs_of_life_ride_on_looks_that_do_not_depend_on_them(
    store: Any, time: VirtualTime
) -> None:
    clock = Clock(time)
    registration = Registration(
        make_settings("a", {}), paused=False, on_change=lambda: None, clock=clock
    )
    registration.start(pauses_known=True)
    heartbeat = Heartbeat(store, quiet, 5.0, clock=clock)
    ours = Member("a")
    looking = lookout(store, time, ours, heartbeat=heartbeat)
    await looking.poll_for(ours)
    assert not store.looks[-1][2], "nothing has joined"
    heartbeat.join(registration)
    await heartbeat.tick()
    for _ in range(12):
        await time.advance(1.0)
        await looking.poll_for(ours)
    alive = [n for n, (_, _, sign) in enumerate(store.looks) if sign]
    assert alive == [5, 10]
    assert registration.has_closed_queues, "a look tells what is paused"
    store.refuses_signs = True
    await time.advance(4.0)
    await looking.poll_for(ours)
    assert [sign for _, _, sign in store.looks[-2:]] == [True, False]
    await looking.poll_for(ours)
    assert not store.looks[-1][2], "the loop of the heartbeat tries, and tells of its failure"
    await heartbeat.leave(registration)
