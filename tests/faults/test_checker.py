"""Each rule of the checker finds its violation in a history made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from tests.faults import history
from tests.faults.checker import RULES, check, excused
from tests.faults.history import Answer, Delivery, Frozen, History, Stall
from tests.faults.plan import RATE

FIRST = Delivery(1, "plain", 1, 0, pid=7, at=1.0, ended="ack", ended_at=1.5, answer=60)
ANSWER = Answer((1,), 60)
BOTH = [(1, history.FIRST), (1, history.LAST)]


def row(**fields: Any) -> dict[str, Any]:
    return {
        "id": 1,
        "number": 1,
        "queue": "plain",
        "state": "COMPLETED",
        "attempts_count": 1,
        "deliveries_count": 1,
        "reason": None,
        "related_id": None,
        **fields,
    }


def good(**fields: Any) -> History:
    made = History(committed={1: "plain"}, deliveries=[FIRST], archived=[row()], answers=[ANSWER])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def broken(history: History) -> list[str]:
    return [rule for rule, found in check(history).items() if found]


def test_a_good_history_breaks_nothing() -> None:
    assert broken(good()) == []
    crashed = replace(FIRST, ended=None)
    again = replace(FIRST, deliveries=2, pid=8, at=2.0)
    assert (
        broken(good(deliveries=[crashed, again], killed={7}, archived=[row(deliveries_count=2)]))
        == []
    )
    again = replace(FIRST, deliveries=2, attempts=1, at=2.0)
    counted = row(deliveries_count=2, attempts_count=2)
    for ended in ("nack", "refused", "tried", "caught", "rolled back"):
        failed = replace(FIRST, ended=ended)
        assert broken(good(deliveries=[failed, again], archived=[counted])) == []


@pytest.mark.parametrize("pid", [7, None])
def test_a_lease_may_be_lost_while_its_holder_stands_still(pid: int | None) -> None:
    lost = replace(FIRST, lost=True, unknown=True, lost_at=3.0)
    for stall in (Stall(-0.5, 0.5, pid), Stall(1.2, 1.4, pid), Stall(2.5, 4.0, pid)):
        made = good(deliveries=[lost], stalls=[stall], lease=2.0)
        assert broken(made) == []
        assert excused(made) == 1
    assert excused(good(stalls=[Stall(0.0, 9.0, pid)], lease=2.0)) == 0


def test_a_batch_with_its_answers_breaks_nothing() -> None:
    both = [replace(BATCHED, number=n) for n in (1, 2)]
    rows = [row(number=n, queue="batch") for n in (1, 2)]
    answers = [ANSWER, Answer((2,), 60), Answer((1, 2), 9, joint=True)]
    known = {1: "batch", 2: "batch"}
    assert broken(good(committed=known, deliveries=both, archived=rows, answers=answers)) == []
    # What was nacked by itself is not in the answer of the others.
    alone = [both[0], replace(both[1], ended="nack", answer=None)]
    failed = [
        rows[0],
        row(number=2, queue="batch", state="FAILED", reason="max_attempts", attempts_count=3),
    ]
    failed[1]["deliveries_count"] = 3
    starts = [*alone, *(replace(alone[1], deliveries=n, at=float(n)) for n in (2, 3))]
    answers = [ANSWER, Answer((1,), 9, joint=True)]
    assert broken(good(committed=known, deliveries=starts, archived=failed, answers=answers)) == []


def test_sql_that_a_handler_committed_itself_stays() -> None:
    committed = replace(FIRST, queue="ending", ended="committed")
    ended = row(queue="ending", state="FAILED", reason="transaction_ended")
    known = good(committed={1: "ending"}, deliveries=[committed], archived=[ended], answers=[])
    known.effects = BOTH[:1]
    assert broken(known) == []


def test_a_process_may_be_unwell_while_a_right_is_missing() -> None:
    health = {7: [(0.1, True), (2.5, False), (4.5, True)], 8: [(3.0, False), (4.4, True)]}
    assert broken(good(frozen=[Frozen(2.0, 4.0, frozenset({8}))], health=health)) == []
    assert broken(good(frozen=[replace(FROZEN, brief=True)], refused={8})) == []
    before_the_answer = {7: [(0.1, True), (1.9, False), (4.5, True)]}
    assert broken(good(frozen=[Frozen(2.0, 4.0)], health=before_the_answer)) == []


def test_a_stale_worker_may_be_out_of_order() -> None:
    late = replace(KEYED, at=2.0, lost=True)
    assert "7 order" not in broken(good(deliveries=[replace(KEYED, number=5), late]))
    crashed = replace(KEYED, ended=None, ended_at=None)
    assert "7 order" not in broken(
        good(deliveries=[crashed, replace(KEYED, number=5, at=2.0)], killed={7})
    )
    assert "7 order" not in broken(good(deliveries=[KEYED, replace(KEYED, number=5, at=2.0)]))


AGAIN = replace(FIRST, deliveries=2, pid=8, at=2.0)
TX = row(queue="tx")
KEYED = replace(FIRST, queue="ordered")
BATCHED = replace(FIRST, queue="batch")
IN_BATCH = row(queue="batch")
THROTTLED = replace(FIRST, queue="throttled")
DEBOUNCED = row(queue="debounced", number=1, state="DISCARDED", reason="superseded")
FROZEN = Frozen(0.5, 4.0, frozenset({8}))
CASES: dict[str, tuple[str, History]] = {
    "gone": ("1 nothing lost", good(archived=[], answers=[])),
    "still live": ("1 nothing lost", good(live=[row(state="PENDING")], archived=[], answers=[])),
    "twice in the archive": ("1 nothing lost", good(archived=[row(), row()])),
    "rolled back, but seen": ("1 nothing lost", good(rolled_back={1}, committed={})),
    "from nowhere": ("1 nothing lost", good(committed={})),
    "again for no reason": (
        "2 no repeat without a reason",
        good(deliveries=[FIRST, AGAIN], archived=[row(deliveries_count=2)]),
    ),
    "one queue waits for another": (
        "1 nothing stands still",
        good(stuck=["messages [1] were not handled"]),
    ),
    "again and again": (
        "2 no repeat in vain",
        good(
            deliveries=[replace(FIRST, deliveries=n, at=float(n)) for n in (1, 2, 3)],
            killed={7},
            frozen=[Frozen(0.5, 4.0)],
            archived=[row(deliveries_count=3)],
        ),
    ),
    "a message_id given again": (
        "2 message_id of one message",
        good(message_ids={"1-5": {1}, "2-6": {2, 3}}),
    ),
    "FAILED for nothing": (
        "8 no FAILED without a cause",
        good(archived=[row(state="FAILED", reason="transaction_ended")]),
    ),
    "ready where nothing can be written": (
        "health told",
        good(frozen=[replace(FROZEN, brief=True)], health={8: [(2.0, True)]}),
    ),
    "begun without a right": (
        "2 no repeat in vain",
        good(deliveries=[replace(FIRST, pid=8)], frozen=[FROZEN]),
    ),
    "a newcomer says nothing": ("health told", good(frozen=[replace(FROZEN, brief=True)])),
    "a newcomer is unwell until it is killed": (
        "health told",
        good(frozen=[replace(FROZEN, brief=True)], health={8: [(2.0, False)]}, killed={8}),
    ),
    "well without a right": ("health told", good(frozen=[FROZEN], health={7: [(0.1, True)]})),
    "unwell for ever": (
        "health told",
        good(frozen=[FROZEN], health={7: [(0.1, True), (1.0, False)]}),
    ),
    "one delivery twice": (
        "3 stale workers change nothing",
        good(deliveries=[FIRST, replace(FIRST, pid=8)], killed={7}),
    ),
    "settled by the older": (
        "3 stale workers change nothing",
        good(deliveries=[FIRST, AGAIN], killed={7, 8}),
    ),
    "completed, not acked": (
        "3 stale workers change nothing",
        good(deliveries=[replace(FIRST, ended="nack")]),
    ),
    "completed, but the answer was refused": (
        "3 stale workers change nothing",
        good(deliveries=[replace(FIRST, ended="refused")]),
    ),
    "completed, but the lease was lost": (
        "3 stale workers change nothing",
        good(deliveries=[replace(FIRST, lost=True)], disturbed={7}),
    ),
    "failed, but acked": (
        "3 stale workers change nothing",
        good(archived=[row(state="FAILED", reason="x")], answers=[]),
    ),
    "a lease lost for nothing": (
        "3 live holders keep their leases",
        good(deliveries=[replace(FIRST, lost=True, unknown=True)]),
    ),
    "a lease lost long after a stall": (
        "3 live holders keep their leases",
        good(
            deliveries=[replace(FIRST, lost=True, unknown=True)],
            stalls=[Stall(FIRST.at - 9, FIRST.at - 8)],
            lease=2.0,
        ),
    ),
    "a lease lost while another stood still": (
        "3 live holders keep their leases",
        good(
            deliveries=[replace(FIRST, lost=True, unknown=True)],
            stalls=[Stall(FIRST.at, FIRST.at + 1, 8)],
        ),
    ),
    "at most once, twice": (
        "4 at most once",
        good(
            committed={1: "once"},
            killed={7},
            answers=[],
            deliveries=[replace(FIRST, queue="once"), replace(AGAIN, queue="once")],
            archived=[row(queue="once", deliveries_count=2)],
        ),
    ),
    "cut off, not listed": (
        "4 cut-off starts are listed",
        good(
            committed={1: "once"},
            killed={7},
            answers=[],
            archived=[row(queue="once")],
            deliveries=[replace(FIRST, queue="once", ended=None)],
        ),
    ),
    "removed, never started, not listed": (
        "4 cut-off starts are listed",
        good(committed={1: "once"}, answers=[], archived=[row(queue="once")], deliveries=[]),
    ),
    "listed, but ended": (
        "4 cut-off starts are listed",
        good(
            committed={1: "once"},
            answers=[],
            archived=[row(queue="once")],
            listed={1},
            deliveries=[replace(FIRST, queue="once")],
        ),
    ),
    "listed, but not removed": ("4 cut-off starts are listed", good(listed={-5})),
    "out of order": (
        "7 order",
        good(deliveries=[replace(KEYED, number=5), replace(KEYED, at=2.0)]),
    ),
    "two of a key at a time": (
        "7 order",
        good(deliveries=[KEYED, replace(KEYED, number=5, at=1.2)]),
    ),
    "no effect": ("5 transactions", good(committed={1: "tx"}, archived=[TX])),
    "half of the effects": (
        "5 transactions",
        good(committed={1: "tx"}, archived=[TX], effects=BOTH[1:]),
    ),
    "the effects twice": (
        "5 transactions",
        good(committed={1: "tx"}, archived=[TX], effects=BOTH * 2),
    ),
    "an effect of nothing": ("5 transactions", good(effects=BOTH)),
    "an effect of a failure": (
        "5 transactions",
        good(
            committed={1: "tx"},
            answers=[],
            deliveries=[replace(FIRST, queue="tx", ended="nack")],
            archived=[row(queue="tx", state="FAILED", reason="max_attempts")],
            effects=BOTH[:1],
        ),
    ),
    "an effect after the handler's own COMMIT": (
        "5 transactions",
        good(
            committed={1: "ending"},
            answers=[],
            deliveries=[replace(FIRST, queue="ending", ended="committed")],
            archived=[row(queue="ending", state="FAILED", reason="transaction_ended")],
            effects=BOTH,
        ),
    ),
    "completed after the handler's own COMMIT": (
        "5 transactions",
        good(
            committed={1: "ending"},
            deliveries=[replace(FIRST, queue="ending", ended="committed")],
            archived=[row(queue="ending")],
            effects=BOTH,
        ),
    ),
    "said to have been ended": (
        "5 transactions",
        good(
            committed={1: "tx"},
            answers=[],
            deliveries=[replace(FIRST, queue="tx")],
            archived=[row(queue="tx", state="FAILED", reason="transaction_ended")],
        ),
    ),
    "no answer": ("6 answers", good(answers=[])),
    "two answers": ("6 answers", good(answers=[ANSWER, ANSWER])),
    "half an answer": ("6 answers", good(answers=[Answer((1,), 59)])),
    "an answer that was not to be": ("6 answers", good(deliveries=[replace(FIRST, answer=None)])),
    "two of one dedup_id": ("6 answers", good(answers=[ANSWER, Answer(()), Answer(())])),
    "an answer of a failure": (
        "6 answers",
        good(
            archived=[
                row(state="FAILED", reason="max_attempts", attempts_count=3, deliveries_count=3)
            ]
        ),
    ),
    "a batch without its answer": (
        "6 answers of batches",
        good(committed={1: "batch"}, deliveries=[BATCHED], archived=[IN_BATCH]),
    ),
    "a batch with two": (
        "6 answers of batches",
        good(
            committed={1: "batch"},
            deliveries=[BATCHED],
            archived=[IN_BATCH],
            answers=[ANSWER, *[Answer((1,), 9, joint=True)] * 2],
        ),
    ),
    "the answer of a batch that was not acked": (
        "6 answers of batches",
        good(
            committed={1: "batch"},
            deliveries=[replace(BATCHED, ended="nack")],
            archived=[row(queue="batch", state="FAILED", reason="max_attempts")],
            answers=[Answer((1,), 9, joint=True)],
        ),
    ),
    "a slot without a look": ("policies", good(deliveries=[THROTTLED])),
    "too many starts": (
        "policies",
        good(deliveries=[replace(THROTTLED, number=n, looked=n) for n in range(RATE + 1)]),
    ),
    "a key that started twice": (
        "policies",
        good(deliveries=[replace(FIRST, queue="once a key", number=n) for n in (1, 2)]),
    ),
    "left out for an older one": (
        "policies",
        good(archived=[DEBOUNCED, {**DEBOUNCED, "id": 2, "number": 4, "related_id": 1}]),
    ),
    "left out for one that never started": (
        "policies",
        good(
            archived=[
                {**DEBOUNCED, "related_id": 3},
                {**DEBOUNCED, "id": 3, "state": "FAILED", "deliveries_count": 0},
            ]
        ),
    ),
    "dead, and not in the queue of the dead": (
        "moves and cancels",
        good(archived=[row(queue="dying", state="FAILED", reason="max_attempts")]),
    ),
    "discarded for nothing": (
        "moves and cancels",
        good(archived=[row(state="DISCARDED", reason="cancelled")], answers=[]),
    ),
    "each of a key a duplicate": (
        "policies",
        good(archived=[row(queue="once a key", state="DISCARDED", reason="duplicate")]),
    ),
    "cancelled, and completed": ("moves and cancels", good(cancelled={1})),
    "a tick twice": ("schedules", good(ticks=[row(number=2), row(number=2)])),
    "no tick": ("schedules", good(ticks=[row(number=2), row(number=6)])),
    "a queue left behind": (
        "nothing left behind",
        good(
            calm_at=0.0,
            lease=2.0,
            deliveries=[FIRST, replace(FIRST, number=2, queue="throttled", ended_at=12.1)],
        ),
    ),
    "beyond the attempts": ("8 limits", good(deliveries=[replace(FIRST, attempts=3)])),
    "beyond the deliveries": (
        "8 limits",
        good(deliveries=[replace(FIRST, deliveries=31)], archived=[row(deliveries_count=31)]),
    ),
    "an attempt too many": ("8 limits", good(archived=[row(attempts_count=2, deliveries_count=2)])),
    "gave up early": (
        "8 limits",
        good(
            deliveries=[replace(FIRST, ended="nack")],
            answers=[],
            archived=[row(state="FAILED", reason="max_attempts", attempts_count=1)],
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_promise_is_found(case: str) -> None:
    rule, history = CASES[case]
    assert rule in broken(history)


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, _ in CASES.values()} == set(RULES)
