"""Rows that stay in the message table with something new: moves, dead letters, messages that are
not ready."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from faststream_sqlbroker.core.outcome import Ack, Defer, Nack, NotReady, Outcome, Reject, Relocate
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from tests.contract.conftest import Bench

RULES = SettleRules(retry_strategy=ConstantRetryStrategy(delay_seconds=0, max_attempts=3))
TO_DEAD = replace(RULES, dead_letter_queue="dead")
HEADERS = {"a": {"b": [1, None, "ü \\ \" '"]}, "content-type": "application/json"}
TEXT = json.dumps(HEADERS)


async def put(bench: Bench, count: int = 1, **fields: Any) -> None:
    await bench.store.insert([NewMessage("q", b"%d" % n, TEXT, **fields) for n in range(count)])


async def test_a_move_with_everything(bench: Bench) -> None:
    """M7: same id, key, priority and times; counters reset, dedup_id dropped."""
    await put(bench, key="k", dedup_id="d", priority=3, expires_in=600.0)
    await bench.execute(
        "UPDATE message SET attempts_count = 2, deliveries_count = 2, last_error = 'before'"
    )
    before = await bench.one()
    [message] = await bench.claim()
    move = Relocate("other", b"\x00new \xff", json.dumps({"c": "ä"}), 3_000.0)
    await bench.store.settle([settle(message, move, RULES, ended_after=1.0)])
    row = await bench.one()
    assert (row["state"], row["queue"], row["payload"], row["headers"]) == (
        "PENDING",
        "other",
        b"\x00new \xff",
        {"c": "ä"},
    )
    assert (row["attempts_count"], row["deliveries_count"], row["dedup_id"]) == (0, 0, None)
    assert (row["first_attempt_at"], row["last_attempt_at"], row["lease_token"]) == (
        None,
        None,
        None,
    )
    for name in (
        "id",
        "key",
        "priority",
        "created_at",
        "expires_at",
        "publish_count",
        "last_error",
    ):
        assert row[name] == before[name], name
    wait = row["next_attempt_at"] - await bench.store.server.read_now()
    assert timedelta(seconds=2_500) < wait <= timedelta(seconds=3_000)


async def test_each_row_of_a_batch_gets_its_own(bench: Bench) -> None:
    """More of them than one statement's share."""
    count = 1_200
    await put(bench, count)
    rows = await bench.claim(count)
    outcomes = [
        Relocate("other", f"new {n}".encode(), json.dumps({"n": n}))
        if n % 3 == 0
        else Relocate("other", None, json.dumps({"n": n}))
        if n % 3 == 1
        else Relocate("other")
        for n in range(count)
    ]
    result = await bench.store.settle(
        [settle(r, o, RULES, ended_after=0.0) for r, o in zip(rows, outcomes, strict=True)]
    )
    assert len(result.settled_ids) == count
    for n, row in enumerate(await bench.rows()):
        assert row["payload"] == (b"new %d" % n if n % 3 == 0 else b"%d" % n)
        assert row["headers"] == ({"n": n} if n % 3 < 2 else HEADERS)


async def test_a_dead_letter_is_a_message_of_another_queue(bench: Bench) -> None:
    """M4: claimed there with its body, its headers and where it comes from."""
    await put(bench, dedup_id="d")
    for attempt in range(3):
        [message] = await bench.claim()
        nack = Nack(error=ValueError(f"no {attempt}"))
        await bench.store.settle([settle(message, nack, TO_DEAD, ended_after=0.5)])
    assert await bench.rows(archive=True) == []
    row = await bench.one()
    assert (row["id"], row["queue"], row["state"], row["dedup_id"]) == (
        message.id,
        "dead",
        "PENDING",
        None,
    )
    assert "ValueError: no 2" in row["last_error"]
    [dead] = await bench.claim(1, "dead")
    assert (dead.payload, dead.attempts_count, dead.deliveries_count) == (b"0", 0, 1)
    assert dead.first_attempt_at is None
    headers = dead.headers
    origin = headers.pop("dead-letter")
    assert headers == HEADERS
    assert "ValueError: no 2" in origin.pop("error")
    assert origin == {"queue": "q", "reason": "max_attempts", "attempts": 3, "deliveries": 3}


async def test_a_dead_letter_that_fails_again_tells_of_its_last_queue(bench: Bench) -> None:
    await put(bench)
    [message] = await bench.claim()
    await bench.store.settle([settle(message, Reject("first"), TO_DEAD, ended_after=0.0)])
    [dead] = await bench.claim(1, "dead")
    await bench.store.settle(
        [
            settle(
                dead, Reject("second"), replace(RULES, dead_letter_queue="deader"), ended_after=0.0
            )
        ]
    )
    row = await bench.one()
    origin = row["headers"]["dead-letter"]
    assert (row["queue"], origin["queue"], origin["reason"]) == ("deader", "dead", "second")


async def test_not_ready_stores_its_first_time_and_charges_nothing(bench: Bench) -> None:
    """P7: the times are independent of the attempts."""
    await put(bench)
    ends = []
    for ended_after in (1.0, 0.5):
        [message] = await bench.claim()
        ends.append(message.acquired_at + timedelta(seconds=ended_after))
        await bench.store.settle([settle(message, NotReady(0, 60), RULES, ended_after=ended_after)])
        row = await bench.one()
        assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("PENDING", 0, 0)
        assert (row["first_attempt_at"], row["last_attempt_at"]) == (ends[0], ends[-1])
    [message] = await bench.claim()
    assert (message.first_attempt_at, message.last_attempt_at) == (ends[0], ends[1])
    await bench.store.settle([settle(message, Nack(), RULES, ended_after=2.0)])
    row = await bench.one()
    assert (row["attempts_count"], row["first_attempt_at"]) == (1, ends[0])
    assert row["last_attempt_at"] == message.acquired_at + timedelta(seconds=2)
    [message] = await bench.claim()
    await bench.store.settle([settle(message, Ack(), RULES, ended_after=0.0)])
    assert (await bench.one(archive=True))["first_attempt_at"] == ends[0]


async def test_postpone_leaves_the_times_alone_and_keeps_the_error(bench: Bench) -> None:
    """P4."""
    await put(bench)
    [message] = await bench.claim()
    await bench.store.settle([settle(message, Defer(0, OSError("away")), RULES, ended_after=1.0)])
    row = await bench.one()
    assert (row["first_attempt_at"], row["last_attempt_at"], row["attempts_count"]) == (
        None,
        None,
        0,
    )
    assert "OSError: away" in row["last_error"]


async def test_not_ready_fails_with_its_reason_when_the_time_is_over(bench: Bench) -> None:
    await put(bench)
    await bench.execute(f"UPDATE message SET first_attempt_at = {bench.past(61)}")
    [message] = await bench.claim()
    await bench.store.settle([settle(message, NotReady(5, 60), RULES, ended_after=0.0)])
    row = await bench.one(archive=True)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "not_ready", 1)


@pytest.mark.parametrize(
    ("outcome", "rules"),
    [
        (Relocate("other", b"new", "{}", 5.0), RULES),
        (Relocate("other"), RULES),
        (Reject("bad"), TO_DEAD),
        (None, TO_DEAD),
        (NotReady(5, 60), RULES),
    ],
    ids=["move", "move as it is", "dead letter", "dead letter without outcome", "not ready"],
)
async def test_after_a_lost_lease_nothing_changes(
    bench: Bench, outcome: Outcome | None, rules: SettleRules
) -> None:
    """Promise 3: one row's lease is still held, one was released, one is now held by another
    worker."""
    await put(bench, 2)
    [stale] = await bench.claim(1)
    await bench.expire()
    await bench.store.release_stuck(["q"], 10)
    late = settle(stale, outcome, rules, ended_after=0.0)

    async def nothing_changes() -> None:
        before = await bench.rows()
        result = await bench.store.settle([late])
        assert (result.settled_ids, result.lost_ids) == (set(), {stale.id})
        assert await bench.rows() == before

    await nothing_changes()
    fresh = await bench.claim(2)
    await nothing_changes()
    [other] = [m for m in fresh if m.id != stale.id]
    result = await bench.store.settle([late, settle(other, outcome, rules, ended_after=0.0)])
    assert (result.settled_ids, result.lost_ids) == ({other.id}, {stale.id})
    assert await bench.rows(archive=True) == []
