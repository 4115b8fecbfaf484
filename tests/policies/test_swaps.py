"""Claims by compare and swap: what was decided is written only if it still holds.

Each race is also run without the comparison, and then breaks its policy.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select, text

from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Delay,
    Header,
    KeepLast,
    Once,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.flags import DELAYED
from faststream_sqlbroker.core.policies.seen import (
    Candidate,
    CompareAndSwap,
    QueueSnapshot,
    QueueSnapshots,
)
from faststream_sqlbroker.core.rows import ClaimedMessages, NewMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.policies.slot_use import ReadTime
from faststream_sqlbroker.database.policies.store import SwapClaim, build_scan, can_swap
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.policies.clock import Clock

postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
ONE_OF_TWO: Sequence[Policy] = [Concurrency(1), Throttle(1, per="1h")]
NOW = 1_750_000_000 * MICROSECONDS


def request(*policies: Policy, **options: Any) -> PolicyClaimRequest:
    return PolicyClaimRequest(["q"], 10, 3600.0, uuid4(), policies, **options)


@pytest.fixture
async def stores(database_url: str) -> AsyncIterator[list[Store]]:
    """Two processes; the queue has been claimed from before."""
    clock = Clock(database_url)
    await clock.prepare()
    tables = build_tables(SqlBrokerSchemaConfig())
    stores = [Store(clock.engine, tables, clock=clock.of_process()) for _ in range(2)]
    await stores[0].server.create_tables()
    await stores[0].server.setup()
    await stores[0].insert([NewMessage("q", b"1")])
    # Not under a limit: it would hold for all that claim within a minute.
    claim, _ = await stores[0].policies.claim(request(Window("00:00", "24:00")), ScanPosition())
    [row] = claim.rows
    await stores[0].settle([Settlement(row.id, row.lease_token, MessageState.COMPLETED)])
    yield stores
    for store in stores:
        await store.close()
    await clock.engine.dispose()


async def look(store: Store, wanted: PolicyClaimRequest) -> SwapClaim:
    """The first statement of a claim."""
    first: Any = build_scan(store.dialect, wanted)
    async with store.engine.connect() as connection:
        seen = await connection.run_sync(first)
    return SwapClaim(wanted, seen, ReadTime(seen.now, 0.0, 0.0), ScanPosition())


async def swap(store: Store, claim: SwapClaim, *, compared: bool = True) -> list[int]:
    """The second."""
    wanted = claim.build_next_swap()
    if wanted is None:
        return []
    async with store.engine.begin() as connection:
        if not compared:
            counter = text("SELECT counter FROM message_policy_state WHERE scope = 'ordered'")
            wanted = replace(wanted, version=(await connection.execute(counter)).scalar_one())
        found: ClaimedMessages | None = await connection.run_sync(
            store.dialect.build_compare_and_swap(wanted)
        )
    claim.apply_swap(wanted, found)
    return [row.id for row in claim.build_result().rows]


@postgresql
@pytest.mark.parametrize("policy", ONE_OF_TWO, ids=str)
@pytest.mark.parametrize("compared", [True, False], ids=["compared", "not compared"])
async def test_of_two_claims_that_have_read_the_same_one_writes(
    stores: list[Store], policy: Policy, compared: bool
) -> None:
    await stores[0].insert([NewMessage("q", b"1"), NewMessage("q", b"2", priority=5)])
    first, second = [await look(store, request(policy)) for store in stores]
    mine = await swap(stores[0], first)
    assert len(mine) == 1
    # Only the other message is left, as if the second had seen it alone.
    second._seen.queues["q"].candidates.pop(0)
    theirs = await swap(stores[1], second, compared=compared)
    if compared:
        assert theirs == []
        assert second.build_result().next_claim_in == 0.0, "it is repeated"
    else:
        assert len({*mine, *theirs}) == 2, "two leases where one is allowed"


@postgresql
@pytest.mark.parametrize("policy", ONE_OF_TWO, ids=str)
async def test_a_claim_that_holds_the_lock_raises_the_version(
    stores: list[Store], policy: Policy
) -> None:
    """Those of other policies do, on the same queue."""
    await stores[0].insert([NewMessage("q", b"1", key="a"), NewMessage("q", b"2", key="b")])
    early = await look(stores[0], request(policy))
    keyed = replace(request(Concurrency(1, per_key=True)), limit=1)
    claim, _ = await stores[1].policies.claim(keyed, ScanPosition())
    assert len(claim.rows) == 1
    assert await swap(stores[0], early) == []


@postgresql
async def test_a_claim_does_not_wait_for_one_that_holds_the_lock(stores: list[Store]) -> None:
    await stores[0].insert([NewMessage("q", b"1")])
    async with stores[1].engine.begin() as connection:
        assert await connection.run_sync(stores[1].dialect.lock_order, ["q"]) == {"q"}
        claiming = stores[0].policies.claim(request(Concurrency(5)), ScanPosition())
        claim, _ = await asyncio.wait_for(claiming, 60)
        assert (claim.rows, claim.next_claim_in) == ([], 0.0)
    claim, _ = await stores[0].policies.claim(request(Concurrency(5)), ScanPosition())
    assert len(claim.rows) == 1


@postgresql
async def test_a_message_that_another_has_locked_is_left_out(stores: list[Store]) -> None:
    ids = await stores[0].insert([NewMessage("q", b"1"), NewMessage("q", b"2")])
    async with stores[1].engine.begin() as connection:
        message = stores[1].tables.message
        first = select(message.c.id).where(message.c.id == ids[0])
        await connection.execute(first.with_for_update())
        claim, _ = await stores[0].policies.claim(request(Concurrency(5)), ScanPosition())
    assert [row.id for row in claim.rows] == [ids[1]]
    assert claim.next_claim_in == 0.0


@postgresql
async def test_what_was_leased_is_returned_when_the_next_queue_fails(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each queue is a transaction of its own. Without a worker the lease would only run out."""
    for queue in ("q", "failing"):
        await stores[1].insert([NewMessage(queue, b"1")])
    both = replace(request(Window("00:00", "24:00")), queues=["q", "failing"])
    none = replace(both, limit=1, queues=["failing"])
    claim, memory = await stores[0].policies.claim(none, ScanPosition())
    await stores[1].insert([NewMessage("failing", b"2")])
    claim, memory = await stores[0].policies.claim(replace(both, limit=0), memory)
    swapping = stores[0].dialect.build_compare_and_swap

    def fail(_: Any) -> Any:
        raise TransientStoreError("gone")

    monkeypatch.setattr(
        stores[0].dialect,
        "build_compare_and_swap",
        lambda s: fail if s.queue == "failing" else swapping(s),
    )
    claim, _ = await stores[0].policies.claim(both, memory)
    assert [row.queue for row in claim.rows] == ["q"]
    assert claim.next_claim_in == 0.0
    with pytest.raises(TransientStoreError):
        await stores[0].policies.claim(none, memory)


@postgresql
@pytest.mark.parametrize("policy", [Concurrency(3), Throttle(3, per="1h")], ids=str)
async def test_many_claims_at_once_neither_double_nor_exceed(
    stores: list[Store], policy: Policy
) -> None:
    """Real races: eight claimers, one message each, until nothing more may start."""
    await stores[0].insert([NewMessage("q", b"%d" % n) for n in range(40)])
    found: list[int] = []

    async def claimer(store: Store) -> None:
        memory = ScanPosition()
        for _ in range(25):
            wanted = replace(request(policy), limit=1)
            claim, memory = await store.policies.claim(wanted, memory)
            found.extend(row.id for row in claim.rows)

    await asyncio.gather(*(claimer(stores[n % 2]) for n in range(8)))
    assert len(found) == len(set(found)) == 3


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ([Window("00:00", "24:00"), Delay("1s"), Once("1h")], True),
        ([Concurrency(5), Throttle(5, per="1s"), Throttle(9, per="1h")], True),
        ([Concurrency(5, per_key=True)], False),
        ([Concurrency(5, scope="s")], False),
        ([Throttle(5, per="1s", scope="s")], False),
        ([Throttle(5, per="1s", key=True)], False),
        ([Throttle(5, per="1s", when_exceeded="drop")], False),
        ([Debounce("1s")], False),
        ([Once("1h", key=Header("tenant"))], False),
        ([Concurrency(5), KeepLast("1s")], False),
    ],
)
def test_which_policies_need_no_lock(policies: list[Policy], expected: bool) -> None:
    assert can_swap(request(*policies)) is expected


def test_what_takes_order_or_one_message_needs_the_lock() -> None:
    assert not can_swap(request(Concurrency(5), ordered=True))
    assert not can_swap(request(Concurrency(5), only=7))


def seen(*candidates: Candidate, version: int | None = 1, running: int = 0) -> QueueSnapshots:
    return QueueSnapshots(NOW, {"q": QueueSnapshot("q", version, running, {}, list(candidates))})


def candidate(number: int, **fields: Any) -> Candidate:
    return Candidate(number, 0, False, False, 0)._replace(**fields)


def has_noted() -> ScanPosition:
    """Of a process that has just told the others of its policies."""
    memory = ScanPosition()
    memory.intake.limits["q", False] = 0.0, 5
    memory.intake.noted_at["q"] = 0.0
    return memory


def decided(
    found: QueueSnapshots, *policies: Policy, **options: Any
) -> tuple[SwapClaim, CompareAndSwap | None]:
    claim = SwapClaim(request(*policies, **options), found, ReadTime(NOW, 0.0, 0.0), has_noted())
    return claim, claim.build_next_swap()


def test_no_more_is_leased_than_the_leases_leave() -> None:
    many = [candidate(n) for n in range(10)]
    _, swap = decided(seen(*many, running=3), Concurrency(5))
    assert swap is not None
    assert swap.ids == [0, 1]
    assert decided(seen(*many, running=5), Concurrency(5))[1] is None


def test_slots_are_spent_by_what_starts() -> None:
    """Not by the expired, nor by what becomes a dead letter for want of a key."""
    found = seen(candidate(1, expired=True), candidate(2, keyless=True), candidate(3))
    policies = Throttle(10, per="1h"), Once("1h", without_key="dead_letter")
    _, swap = decided(found, *policies)
    assert swap is not None
    assert swap.ids == [1, 2, 3]
    [(info, _)] = swap.states.values()
    [at, count] = info["slots"]
    assert count == 1, "one slot"
    assert NOW < at <= NOW + 2 * MICROSECONDS, "of now, and its start may be a little later"


def test_suspects_are_left_alone_and_spend_nothing() -> None:
    found = seen(candidate(1, lost_leases=2), candidate(2))
    claim, swap = decided(found, Throttle(1, per="1h"), suspect_rule=SuspectRule())
    assert swap is not None
    assert swap.ids == [2]
    assert set(claim.build_result().suspects) == {1}


def test_a_closed_window_lets_nothing_start_and_tells_when() -> None:
    claim, swap = decided(seen(candidate(1)), Window("00:00", "00:01"))
    result = claim.build_result()
    assert swap is None
    assert result.is_blocked
    assert result.next_claim_in is not None
    assert result.next_claim_in > 0


@pytest.mark.parametrize(
    ("found", "policies", "needed"),
    [
        (seen(candidate(1), version=None), [Concurrency(5)], True),
        (seen(candidate(1)), [Delay("1s")], True),
        (seen(candidate(1, flags=DELAYED)), [Delay("1s")], False),
        (QueueSnapshots(NOW), [Delay("1s")], False),
    ],
)
def test_what_is_new_to_delay_or_to_the_queue_takes_the_lock(
    found: QueueSnapshots, policies: list[Policy], needed: bool
) -> None:
    claim = SwapClaim(request(*policies), found, ReadTime(NOW, 0.0, 0.0), has_noted())
    assert claim.needs_lock is needed


@pytest.mark.parametrize("policy", [Concurrency(5), Delay("1s")], ids=str)
def test_what_other_processes_must_know_is_noted_under_the_lock(policy: Policy) -> None:
    """And heard of: with another limit the lower one holds."""
    found = seen(candidate(1, flags=DELAYED))
    late = ReadTime(NOW, 60.0, 60.0)
    assert SwapClaim(request(policy), found, late, has_noted()).needs_lock


def test_the_lowest_limit_that_is_known_holds() -> None:
    memory = has_noted()
    memory.intake.limits["q", False] = 0.0, 2
    found = seen(*(candidate(n) for n in range(5)))
    claim = SwapClaim(request(Concurrency(5)), found, ReadTime(NOW, 0.0, 0.0), memory)
    swap = claim.build_next_swap()
    assert swap is not None
    assert swap.ids == [0, 1]
