"""Policies with backlogs, suspects, expiry, few workers and unusual keys, on every database."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from time import monotonic
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from faststream_sqlbroker.core.outcome import Abandon, Ack, Nack
from faststream_sqlbroker.core.policies import Concurrency, Debounce, Once, Policy, Throttle
from faststream_sqlbroker.core.policies.flags import SLOT
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.policies.request import (
    PolicyClaim,
    PolicyClaimRequest,
    ScanPosition,
)
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.prefetch import HORIZON
from tests.flow.conftest import Rig, ticks
from tests.flow.test_database_failures import NoLimit
from tests.flow.test_policies import QUICK, archived, slot_of
from tests.helpers import eventually


class Process:
    """Claims of one process, which remembers where it has looked."""

    def __init__(self, rig: Rig, policies: list[Policy], **wanted: Any) -> None:
        self._rig = rig
        self._policies = policies
        self._wanted = wanted
        self._memory = ScanPosition()

    async def claim(self, limit: int = 10, **wanted: Any) -> PolicyClaim:
        """One."""
        asked = PolicyClaimRequest(
            ["q"], limit, 60.0, uuid4(), self._policies, **self._wanted, **wanted
        )
        claimed, self._memory = await self._rig.store.policies.claim(asked, self._memory)
        return claimed


async def backlog(rig: Rig, count: int, seconds: int, **fields: Any) -> list[int]:
    """Messages that have been due for `seconds`."""
    ids = await rig.put(count, **fields)
    past = rig.past(seconds)
    await rig.execute(
        f"UPDATE message SET next_attempt_at = {past}, created_at = {past} WHERE id >= {ids[0]}"
    )
    return ids


@pytest.mark.parametrize("key", [False, True])
async def test_a_suspect_gets_a_slot_and_starves_no_message(rig: Rig, key: bool) -> None:
    """Z10: what has lost leases runs alone; looking at it spends no slot."""
    [suspect] = await backlog(rig, 1, 10, key="a")
    await rig.execute("UPDATE message SET deliveries_count = 2")
    [other] = await rig.put(1, key="a")
    await rig.consumer(policies=[Throttle(1, per="700ms", key=key)], max_workers=1, **QUICK).start()
    await archived(rig, 2)
    assert {row.id for row in rig.handled} == {suspect, other}


@pytest.mark.parametrize(
    ("policies", "ordered"),
    [
        ([Concurrency(1, per_key=True)], False),
        ([Concurrency(5)], True),
        ([Throttle(9, per="1s", burst=9, key=True)], True),
    ],
    ids=["per key", "ordered", "ordered, by key"],
)
async def test_a_suspect_that_runs_alone_takes_no_lease_of_a_key_that_is_held(
    rig: Rig, policies: list[Policy], ordered: bool
) -> None:
    """Z10, and G1 where the queue is ordered: other processes may have leases of its key."""
    [first, suspect] = await backlog(rig, 2, 10, key="a")
    process = Process(rig, policies, ordered=ordered)
    if ordered:
        assert (await process.claim(only=suspect)).rows == [], "it is not the first of its key"
    held = await process.claim(1)
    assert [row.id for row in held.rows] == [first]
    assert (await process.claim(only=suspect)).rows == []
    done = settle(held.rows[0], Ack(), SettleRules(), ended_after=0.0)
    await rig.store.settle([done])
    assert [row.id for row in (await process.claim(only=suspect)).rows] == [suspect]


@pytest.mark.parametrize("exceeded", ["drop", "dead_letter"])
async def test_a_backlog_is_scanned_whatever_a_claim_leaves_of_it(rig: Rig, exceeded: Any) -> None:
    """Z10: with few workers each claim grants few slots; the next goes on where it has stopped."""
    await backlog(rig, 40, 30)
    process = Process(rig, [Throttle(15, per="1h", burst=15, when_exceeded=exceeded)])
    rows: list[ClaimedMessage] = []
    for _ in range(30):
        claim = await process.claim(2)
        rows += claim.rows
        assert claim.rows or claim.has_more or not await waiting(rig)
    assert not await waiting(rig)
    assert len([row for row in rows if row.outcome is None]) == 15


async def waiting(rig: Rig) -> list[int]:
    """Messages that are not claimed."""
    return [row["id"] for row in await rig.rows() if row["state"] == "PENDING"]


@pytest.mark.parametrize(
    "policies",
    [
        [Concurrency(1), Throttle(100, per="1s", burst=100, when_exceeded="drop")],
        [Throttle(1, per="1h"), Throttle(1, per="1h", key=True, when_exceeded="dead_letter")],
    ],
    ids=str,
)
async def test_a_claim_that_finds_nothing_does_not_loop(rig: Rig, policies: list[Policy]) -> None:
    """A claim that can start nothing does not ask to be repeated at once, for ever."""
    process = Process(rig, policies)
    await rig.put(5, key="a")
    for _ in range(10):
        claim = await process.claim()
        if not claim.rows and not claim.has_more:
            break
    else:
        pytest.fail("no end")


async def test_missed_slots_of_one_key_keep_no_other_waiting(rig: Rig) -> None:
    """Z10: after an outage all of them are asked for again."""
    await backlog(rig, 150, 60, key="a")
    await rig.execute(f"UPDATE message SET policy_marks = {SLOT}")
    [other] = await rig.put(1, key="b")
    throttle = Throttle(1, per="1h", key=True, when_exceeded="backoff")
    process = Process(rig, [throttle])
    found: list[int] = []
    for _ in range(8):
        found += [row.id for row in (await process.claim(1)).rows]
    assert other in found
    assert len(found) == 2


async def test_arrivals_of_all_priorities_are_taken_in_order(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z7: also where there are more than one look finds, of one priority and not of another."""
    for module in ("rows", "intake"):
        monkeypatch.setattr(f"faststream_sqlbroker.database.policies.{module}.SCAN_SIZE", 10)
    now = await rig.store.server.read_now()

    async def put(count: int, seconds: int, **fields: Any) -> list[int]:
        ids = await rig.put(count, **fields)
        at = now - timedelta(seconds=seconds)
        message = rig.store.tables.message
        of_them = message.update().where(message.c.id >= ids[0])
        async with rig.store.engine.begin() as connection:
            await connection.execute(of_them.values(next_attempt_at=at, created_at=at))
        return ids

    await put(20, 100, key="b")
    [first] = await put(1, 90, key="a")
    await put(20, 89, key="b")
    [second] = await put(1, 80, key="a")
    [newest] = await put(1, 85, key="a", priority=5)
    process = Process(rig, [Debounce("6s")])
    delivered: list[int] = []
    for _ in range(30):
        claim = await process.claim()
        delivered += [row.id for row in claim.rows if row.key == "a"]
    assert delivered == [newest]
    gone = {r["id"]: r["reason"] for r in await rig.rows(archive=True) if r["key"] == "a"}
    assert set(gone) == {first, second}


@pytest.mark.parametrize("end", ["crash", "hand-back"])
async def test_a_started_message_does_not_run_again_when_its_key_is_free(
    rig: Rig, end: str
) -> None:
    """Z4: a crash leaves the outcome unknown, however short the ttl. So does a handler that was cut
    off, which costs an attempt where those are not limited.
    """
    [message] = await rig.put(1, key="a")
    policies = [Once("10ms")]
    process = Process(rig, policies)
    [row] = (await process.claim()).rows
    verdicts = await rig.store.policies.claim_keys([row], 0.01)
    assert verdicts[message][0].name == "START"
    await asyncio.sleep(0.05)
    if end == "crash":
        await rig.expire()
        assert await rig.store.release_stuck(["q"], 10) == 1
    else:
        rules = SettleRules(retry_strategy=ConstantRetryStrategy(delay_seconds=0))
        await rig.store.settle([settle(row, Abandon(), rules, ended_after=0.0)])
    await rig.store.remove_expired_states(10)
    [row] = (await process.claim()).rows
    verdicts = await rig.store.policies.claim_keys([row], 0.01)
    assert verdicts[message][0].name == "UNKNOWN"


async def test_expired_messages_spend_no_slot(rig: Rig) -> None:
    """Z10: a slot is for a start."""
    expired = await rig.put(3, expires_in=1e-6)
    [good] = await rig.put(1)
    process = Process(rig, [Throttle(1, per="1h")])
    rows: list[int] = []
    for _ in range(4):
        claim = await process.claim()
        rows += [row.id for row in claim.rows]
        assert not claim.is_blocked or good in rows
    assert rows == [*expired, good]


async def test_a_worker_that_waits_for_a_slot_is_not_free(rig: Rig) -> None:
    """Z10: no slot is taken for a message that no worker can start in time."""
    go = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        if len(rig.handled) == 2:
            await go.wait()
        row.record_outcome(Ack())

    consumer = rig.consumer(
        handle, policies=[Throttle(10, per="1s", burst=1)], max_workers=1, **QUICK
    )
    await rig.put(6)
    await consumer.start()
    await eventually(lambda: len(rig.handled) == 2)

    async def taken() -> int:
        return sum(row["state"] == "PROCESSING" for row in await rig.rows())

    async def only_the_running_one() -> bool:
        return await taken() == 1

    # Where claims are slow, a slot was granted ahead while the worker was free.
    times = consumer.inflight.times
    await eventually(lambda: monotonic() - times.ended_at > HORIZON)
    await eventually(only_the_running_one)
    await ticks(consumer._fetch_loop, 4)
    assert await taken() == 1
    go.set()


async def test_the_first_of_a_key_gets_the_next_slot_again(rig: Rig) -> None:
    """Z10, P7: with ordered=True a retry does not wait for slots of messages that wait for it."""
    ids = await rig.put(8, key="a")
    process = Process(rig, [Throttle(4, per="1h", key=True, burst=1)], ordered=True)
    [first] = (await process.claim()).rows
    again = settle(first, Nack(delay=0.0), SettleRules(retry_strategy=NoLimit()), ended_after=0.0)
    await rig.store.settle([again])
    claim = await process.claim()
    assert claim.rows == []
    assert first.id == ids[0]
    assert claim.next_claim_in is not None
    assert 0 < claim.next_claim_in < 1000, "the slot after that of its first attempt"


async def test_a_key_stays_in_order_though_its_slots_are_short(rig: Rig) -> None:
    """Z10 and P7."""
    handled: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        handled.append(row.id)
        row.record_outcome(Nack(delay=0.0) if len(handled) == 1 else Ack())

    policies = [Throttle(4, per="1s", key=True, burst=1)]
    ids = await rig.put(8, key="a")
    await rig.consumer(handle, policies=policies, ordered=True, **QUICK).start()
    await archived(rig, 8)
    assert handled == [ids[0], *ids]


@pytest.mark.parametrize(
    "policies",
    [
        [Debounce("100ms")],
        [Throttle(1, per="1ms", key=True)],
        [Concurrency(1, per_key=True)],
        [Once("1h")],
    ],
    ids=str,
)
async def test_keys_of_all_kinds_are_kept_apart(rig: Rig, policies: list[Policy]) -> None:
    """Keys that a database could take for the same are different keys."""
    keys = ["a", " a", "A", "ä", "a\u0308", "", "\U0001f600", "'\"\\", "%"]
    for key in keys:
        await rig.put(1, key=key)
    await rig.consumer(policies=policies, max_workers=4, **QUICK).start()
    rows = await archived(rig, len(keys))
    assert {row["state"] for row in rows} == {"COMPLETED"}
    assert sorted(row.key or "" for row in rig.handled) == sorted(keys)


@pytest.mark.parametrize("exceeded", ["wait", "backoff"])
async def test_a_message_behind_another_of_its_key_keeps_no_slot(rig: Rig, exceeded: Any) -> None:
    """Z7 and Z10: bursts of a key that have ended start one after the other, each at a slot of its
    own."""

    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        if len(rig.handled) == 1:
            await asyncio.sleep(1.0)
        row.record_outcome(Ack())

    for seconds in (90, 60, 30):
        await backlog(rig, 1, seconds, key="a")
    throttle = Throttle(1, per="400ms", key=True, when_exceeded=exceeded)
    await rig.consumer(handle, policies=[Debounce("1s"), throttle], max_workers=3, **QUICK).start()
    await archived(rig, 3)
    slots = [slot_of(row) for row in rig.handled]
    assert min(late - early for early, late in pairwise(slots)) >= timedelta(milliseconds=399)


async def test_a_policy_before_it_does_not_forget_the_slots_of_a_throttle(rig: Rig) -> None:
    """Z10: the policies of a queue change, its rate goes on."""
    throttle = Throttle(1, per="1h")
    await rig.put(2)
    assert len((await Process(rig, [throttle]).claim()).rows) == 1
    assert (await Process(rig, [Concurrency(10), throttle]).claim()).rows == []


async def test_a_passing_error_does_not_cost_the_retry(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z4: what may be repeated is, also when its key could not be given back at first."""
    handled: list[int] = []
    give_back = rig.store.policies.release_keys
    failures = iter([TransientStoreError("busy")])

    async def fail_once(rows: Sequence[ClaimedMessage]) -> None:
        for failure in failures:
            raise failure
        await give_back(rows)

    async def handle(row: ClaimedMessage) -> None:
        handled.append(row.id)
        row.record_outcome(Nack(delay=0.0, retry_possible=True) if len(handled) == 1 else Ack())

    monkeypatch.setattr(rig.store.policies, "release_keys", fail_once)
    await rig.consumer(handle, policies=[Once("1h")], **QUICK).start()
    [message] = await rig.put(1, key="a")
    [row] = await archived(rig, 1)
    assert (row["state"], handled) == ("COMPLETED", [message, message])
    text = f"could not release the keys of messages [{message}], so their handlers do not run yet"
    assert rig.logged(text), "the worker waits until then"


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "not committed"])
async def test_a_message_runs_once_though_no_answer_says_whether_its_key_was_claimed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """Z4: and though the database fails for a while then. No handler has begun, so the message is
    not called unknown.
    """
    policies = rig.store.policies
    claim = policies.claim_keys
    give_back = policies.release_keys
    claims: list[StoreError] = [UnknownOutcomeError("lost"), *[TransientStoreError("busy")] * 4]
    busy = [TransientStoreError("busy")] * 7

    async def none_is_free(*_: Any) -> set[int]:
        return set()

    async def fail_to_claim(*args: Any) -> Any:
        if not claims:
            return await claim(*args)
        error = claims.pop(0)
        if committed and isinstance(error, UnknownOutcomeError):
            await claim(*args)
        raise error

    async def give_back_late(rows: Sequence[ClaimedMessage]) -> None:
        if busy:
            raise busy.pop()
        await give_back(rows)

    monkeypatch.setattr(policies, "claim_free_keys", none_is_free)
    monkeypatch.setattr(policies, "claim_keys", fail_to_claim)
    monkeypatch.setattr(policies, "release_keys", give_back_late)
    monkeypatch.setattr("faststream_sqlbroker.flow.deliver.policy_starts.backoff", lambda *_: 0.001)
    await rig.consumer(policies=[Once("1h")], **QUICK).start()
    [message] = await rig.put(1, key="a")
    [row] = await archived(rig, 1)
    assert (row["state"], [each.id for each in rig.handled]) == ("COMPLETED", [message])
    assert (claims, busy) == ([], [])


async def test_a_key_is_given_back_when_its_claim_has_ended(rig: Rig) -> None:
    """A COMMIT without an answer may still be under way: giving back waits for it."""
    if rig.store.engine.dialect.name == "sqlite":
        return  # one writer at a time
    await rig.put(1, key="a")
    [row] = await rig.claim(1)
    engine = rig.store.engine
    async with engine.connect() as connection:
        await connection.execute(
            text("SELECT id FROM message WHERE id = :id FOR UPDATE"), {"id": row.id}
        )
        giving = asyncio.create_task(rig.store.policies.release_keys([row]))
        done, _ = await asyncio.wait([giving], timeout=0.3)
        assert not done
        await connection.rollback()
    await giving


async def test_a_key_that_is_given_back_too_late_stays_with_the_unknown(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z4: the lease of a slow process has run out, and its message was called unknown, before it
    gave the key back."""
    give_back = rig.store.policies.release_keys
    late = asyncio.Event()
    go_on = asyncio.Event()
    given_back = asyncio.Event()

    async def give_back_late(rows: Sequence[ClaimedMessage]) -> None:
        late.set()
        await go_on.wait()
        await give_back(rows)
        given_back.set()

    async def handle(row: ClaimedMessage) -> None:
        row.record_outcome(Nack(delay=0.0, retry_possible=True))

    monkeypatch.setattr(rig.store.policies, "release_keys", give_back_late)
    slow = rig.consumer(handle, policies=[Once("1h")], **QUICK, release_stuck_interval=3600.0)
    await slow.start()
    [first] = await rig.put(1, key="a")
    await late.wait()
    other = rig.consumer(
        store=Store(rig.store.engine, rig.store.tables), policies=[Once("1h")], **QUICK
    )
    await other.start()
    await rig.expire()
    await rig.store.release_stuck(["q"], 10)
    [row] = await archived(rig, 1)
    assert (row["state"], row["reason"]) == ("FAILED", "unknown_outcome")
    go_on.set()
    await given_back.wait()
    assert [each.message_id for each in await rig.store.ack_first_starts.list_unknown("q", 10)] == [
        first
    ]
    await rig.put(1, key="a")
    assert [(row["reason"], row["related_id"]) for row in await archived(rig, 2)] == [
        ("unknown_outcome", None),
        ("duplicate", first),
    ]
    assert rig.handled == []


async def test_a_handler_that_cancels_itself_has_failed_once(rig: Rig) -> None:
    """Z4: its outcome is known."""

    async def handle(row: ClaimedMessage) -> None:
        raise asyncio.CancelledError

    await rig.consumer(handle, policies=[Once("1h")], **QUICK).start()
    await rig.put(1, key="a")
    [row] = await archived(rig, 1)
    assert (row["state"], row["reason"]) == ("FAILED", "failed_once")


async def test_a_burst_waits_only_briefly_for_a_message_that_may_be_cancelled(rig: Rig) -> None:
    """Z7: the message before it is tried again in an hour, or never."""
    process = Process(rig, [Debounce("1s")])
    [first] = await backlog(rig, 1, 60, key="a")
    assert [row.id for row in (await process.claim()).rows] == [first]
    [second] = await backlog(rig, 1, 30, key="a")
    await rig.execute(
        "UPDATE message SET state = 'RETRYABLE', acquired_at = NULL, lease_token = NULL, "
        f"lease_expires_at = NULL, next_attempt_at = {rig.past(-3600)} WHERE id = {first}"
    )
    assert (await Process(rig, [Debounce("1s")]).claim()).rows == []
    due = {row["id"]: row["next_attempt_at"] for row in await rig.rows()}
    assert 10 < (due[second] - await rig.store.server.read_now()).total_seconds() <= 60
