"""Each rule finds what it is for, in histories made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.checker import RULES, check
from tests.faults.history import Delivery, History

FIRST = Delivery(1, "plain", 1, 0, pid=7, at=1.0, ended="ack", ended_at=1.5)


def row(**fields: Any) -> dict[str, Any]:
    return {
        "number": 1, "queue": "plain", "state": "COMPLETED", "attempts_count": 1, "deliveries_count": 1,
        "reason": None, **fields,
    }  # fmt: skip


def good(**fields: Any) -> History:
    made = History(committed={1: "plain"}, deliveries=[FIRST], archived=[row()], answers=[1])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def broken(history: History) -> list[str]:
    return [rule for rule, found in check(history).items() if found]


def test_a_good_history_breaks_nothing() -> None:
    assert broken(good()) == []
    crashed = replace(FIRST, ended=None)
    again = replace(FIRST, deliveries=2, pid=8, at=2.0)
    assert broken(good(deliveries=[crashed, again], killed={7}, archived=[row(deliveries_count=2)])) == []
    nacked = replace(FIRST, ended="nack")
    again = replace(FIRST, deliveries=2, attempts=1, at=2.0)
    counted = row(deliveries_count=2, attempts_count=2)
    assert broken(good(deliveries=[nacked, again], archived=[counted])) == []


def test_a_stale_worker_may_be_out_of_order() -> None:
    late = replace(KEYED, at=2.0, lost=True)
    assert "7 order" not in broken(good(deliveries=[replace(KEYED, number=5), late]))
    crashed = replace(KEYED, ended=None, ended_at=None)
    assert "7 order" not in broken(good(deliveries=[crashed, replace(KEYED, number=5, at=2.0)], killed={7}))
    assert "7 order" not in broken(good(deliveries=[KEYED, replace(KEYED, number=5, at=2.0)]))


AGAIN = replace(FIRST, deliveries=2, pid=8, at=2.0)
TX = row(queue="tx")
KEYED = replace(FIRST, queue="ordered")
CASES: dict[str, tuple[str, History]] = {
    "gone": ("1 nothing lost", good(archived=[], answers=[])),
    "still live": ("1 nothing lost", good(live=[row(state="PENDING")], archived=[], answers=[])),
    "twice in the archive": ("1 nothing lost", good(archived=[row(), row()])),
    "rolled back, but seen": ("1 nothing lost", good(rolled_back={1}, committed={})),
    "from nowhere": ("1 nothing lost", good(committed={})),
    "again for no reason": (
        "2 no repeat without a reason", good(deliveries=[FIRST, AGAIN], archived=[row(deliveries_count=2)]),
    ),
    "one delivery twice": (
        "3 stale workers change nothing", good(deliveries=[FIRST, replace(FIRST, pid=8)], killed={7}),
    ),
    "settled by the older": (
        "3 stale workers change nothing", good(deliveries=[FIRST, AGAIN], killed={7, 8}),
    ),
    "completed, not acked": ("3 stale workers change nothing", good(deliveries=[replace(FIRST, ended="nack")])),
    "completed, but the lease was lost": (
        "3 stale workers change nothing", good(deliveries=[replace(FIRST, lost=True)], disturbed={7}),
    ),
    "failed, but acked": (
        "3 stale workers change nothing", good(archived=[row(state="FAILED", reason="x")], answers=[]),
    ),
    "a lease lost for nothing": (
        "3 live holders keep their leases", good(deliveries=[replace(FIRST, lost=True, unknown=True)]),
    ),
    "at most once, twice": (
        "4 at most once",
        good(
            committed={1: "once"}, killed={7}, answers=[],
            deliveries=[replace(FIRST, queue="once"), replace(AGAIN, queue="once")],
            archived=[row(queue="once", deliveries_count=2)],
        ),
    ),
    "cut off, not listed": (
        "4 cut-off starts are listed",
        good(
            committed={1: "once"}, killed={7}, answers=[], archived=[row(queue="once")],
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
            committed={1: "once"}, answers=[], archived=[row(queue="once")], listed={1},
            deliveries=[replace(FIRST, queue="once")],
        ),
    ),
    "listed, but not removed": ("4 cut-off starts are listed", good(listed={-5})),
    "out of order": ("7 order", good(deliveries=[replace(KEYED, number=5), replace(KEYED, at=2.0)])),
    "two of a key at a time": ("7 order", good(deliveries=[KEYED, replace(KEYED, number=5, at=1.2)])),
    "no effect": ("5 transactions", good(committed={1: "tx"}, archived=[TX])),
    "two effects": ("5 transactions", good(committed={1: "tx"}, archived=[TX], effects=[1, 1])),
    "an effect of nothing": ("5 transactions", good(effects=[1])),
    "no answer": ("6 answers", good(answers=[])),
    "two answers": ("6 answers", good(answers=[1, 1])),
    "an answer of a failure": (
        "6 answers", good(archived=[row(state="FAILED", reason="max_attempts", attempts_count=3, deliveries_count=3)]),
    ),
    "beyond the attempts": ("8 limits", good(deliveries=[replace(FIRST, attempts=3)])),
    "beyond the deliveries": (
        "8 limits", good(deliveries=[replace(FIRST, deliveries=31)], archived=[row(deliveries_count=31)]),
    ),
    "an attempt too many": ("8 limits", good(archived=[row(attempts_count=2, deliveries_count=2)])),
    "gave up early": (
        "8 limits",
        good(
            deliveries=[replace(FIRST, ended="nack")], answers=[],
            archived=[row(state="FAILED", reason="max_attempts", attempts_count=1)],
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_breaks_a_promise_is_found(case: str) -> None:
    rule, history = CASES[case]
    assert rule in broken(history)


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, _ in CASES.values()} == set(RULES)
