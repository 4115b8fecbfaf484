"""A look for several subscribers: what is due, when the first lease ends, a sign of life."""

import pytest
from sqlalchemy import event

from faststream_sqlbroker.core.orders import OperatorRequests
from faststream_sqlbroker.core.rows import HeartbeatData
from faststream_sqlbroker.database.store import Store
from tests.contract.conftest import Bench
from tests.contract.test_live_subscribers import known

CHANNEL = "sqlbroker_message"


def sign(
    *names: str, changed: bool = True, lease: float = 600.0, **fields: object
) -> HeartbeatData:
    says = known(*names, **fields)
    return HeartbeatData(says, frozenset(says if changed else ()), lease)


async def test_a_look_finds_what_a_scan_finds_and_when_the_first_lease_ends(bench: Bench) -> None:
    await bench.put(3, "a")
    await bench.put(1, "b", priority=7, delay=1_000.0)
    found = await bench.store.poll_all(["a", "b", "c"], ["a", "b", "c"])
    scanned = await bench.store.find_ready_pairs(["a", "b", "c"])
    assert (
        [(p.queue, p.priority) for p in found.pairs]
        == [(p.queue, p.priority) for p in scanned]
        == [("a", 0), ("b", 7)]
    )
    assert found.pairs[0].due_in <= 0
    assert 800 < found.pairs[1].due_in <= 1_000
    assert (found.lease_ends_in, found.requests) == (None, None)
    await bench.claim(2, "a", lease=5_000.0)
    await bench.claim(1, "a", lease=1_000.0)
    for leased, longest in (["a", "b"], 1_000.0), (["b"], None):
        found = await bench.store.poll_all(["b"], leased)
        assert [p.queue for p in found.pairs] == ["b"]
        if longest is None:
            assert found.lease_ends_in is None
        else:
            assert found.lease_ends_in is not None
            assert longest - 200 < found.lease_ends_in <= longest
    empty = await bench.store.poll_all(["c"], ["c"])
    assert (list(empty.pairs), empty.lease_ends_in) == ([], None)


async def paused(bench: Bench) -> frozenset[str]:
    """What a look with a sign of life says of pauses."""
    found = await bench.store.poll_all(["a"], ["a"], sign("h:1:00"))
    assert found.requests is not None
    return found.requests.paused


async def test_a_look_carries_a_sign_of_life_and_tells_what_is_paused(bench: Bench) -> None:
    await bench.put(1, "a")
    subscribers = bench.store.live_subscribers
    found = await bench.store.poll_all(["a"], ["a"], sign("h:1:00", "h:2:00"))
    assert [p.queue for p in found.pairs] == ["a"]
    assert found.requests == OperatorRequests()
    assert {one.worker for one in await subscribers.list_subscribers()} == {"h:1:00", "h:2:00"}
    await subscribers.pause("b", None, {}, CHANNEL)
    await subscribers.pause("a", 100.0, {}, CHANNEL)
    assert await paused(bench) == {"a", "b"}
    await subscribers.resume("b", CHANNEL)
    assert await paused(bench) == {"a"}


async def test_a_sign_tells_which_of_its_subscribers_are_drained(bench: Bench) -> None:
    subscribers = bench.store.live_subscribers
    both = sign("h:1:00", "h:2:00")
    await bench.store.poll_all(["a"], ["a"], both)
    names = ["h:1:00", "h:2:00", "h:3:00"]
    changed, _ = await subscribers.drain(names[1:], "h:2", CHANNEL, "Ann", drained=True)
    assert changed == {"h:2:00"}
    for _ in range(2):
        found = await bench.store.poll_all(["a"], ["a"], both)
        assert found.requests == OperatorRequests(drained=frozenset({"h:2:00"}))
    assert await subscribers.list_drained(9) == ["h:2:00"]
    other = await bench.store.poll_all(["a"], ["a"], sign("h:1:00"))
    assert other.requests == OperatorRequests()
    orders = await subscribers.write_heartbeat(
        both.descriptions, set(both.descriptions), 60.0, clean=True
    )
    assert orders == OperatorRequests(drained=frozenset({"h:2:00"}))
    changed, _ = await subscribers.drain(names, "h", CHANNEL, "Ann", drained=False)
    assert changed == {"h:2:00"}


async def test_a_sign_lengthens_the_lease_and_tells_only_what_has_changed(bench: Bench) -> None:
    subscribers = bench.store.live_subscribers
    await bench.store.poll_all(["a"], ["a"], sign("h:1:00", lease=600.0))
    [first] = await subscribers.list_subscribers()
    await bench.store.poll_all(
        ["a"], ["a"], sign("h:1:00", changed=False, lease=6_000.0, paused=True)
    )
    [second] = await subscribers.list_subscribers()
    assert not second.paused, "it was not said to be new"
    assert second.since == first.since
    assert (second.lease_expires_at - first.lease_expires_at).total_seconds() > 4_000
    await bench.store.poll_all(["a"], ["a"], sign("h:1:00", paused=True))
    [third] = await subscribers.list_subscribers()
    assert third.paused


@pytest.mark.parametrize("alive", [False, True])
async def test_a_look_takes_few_statements(bench: Bench, store: Store, alive: bool) -> None:
    """One on PostgreSQL; elsewhere one for each thing that it finds or writes."""
    await store.poll_all(["a"], ["a"], sign("h:1:00"))
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    event.listen(store.engine.sync_engine, "before_cursor_execute", note)
    await store.poll_all(["a"], ["a"], sign("h:1:00", changed=False) if alive else None)
    assert count <= (1 if store.dialect_name == "postgresql" else 7 if alive else 2)
