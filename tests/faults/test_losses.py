"""What a failover has lost is no broken promise, and hides none."""

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.checker import check
from tests.faults.history import Loss, Stall
from tests.faults.losses import is_touched, keep_what_is_there
from tests.faults.test_checker import AGAIN, ANSWER, FIRST, good, row

LOSSES = [Loss(0.5, down=2.0, end=3.0)]
COMMITS = {1: (0.7, 0.8)}
CLAIMED = replace(FIRST, claimed=0.9)
AFTERWARDS = replace(FIRST, pid=8, at=5.0, claimed=4.9, ended_at=5.5)


def broken_after(business: dict[int, str], **fields: Any) -> set[str]:
    """The rules that are broken when `business` is what the application finds."""
    history = good(**{"commits": COMMITS, **fields})
    keep_what_is_there(history, business)
    return {rule for rule, found in check(history).items() if found}


def test_a_message_that_the_database_has_lost_was_lost_by_it() -> None:
    fields: dict[str, Any] = {"archived": [], "answers": [], "deliveries": [CLAIMED]}
    history = good(**fields, commits=COMMITS, losses=LOSSES)
    keep_what_is_there(history, {})
    assert history.lost == {1}
    assert history.forgotten == [CLAIMED]
    assert not any(check(history).values())


def test_a_message_with_its_row_must_be_there() -> None:
    found = broken_after({1: "plain"}, archived=[], answers=[], deliveries=[], losses=LOSSES)
    assert found == {"1 nothing lost"}


def test_a_message_without_its_row_must_not_be_there() -> None:
    assert broken_after({}, losses=LOSSES, deliveries=[CLAIMED]) >= {"1 nothing lost"}


@pytest.mark.parametrize("commits", [(0.1, 0.4), (3.1, 3.2)])
def test_no_failover_excuses_what_was_committed_before_or_after_it(
    commits: tuple[float, float],
) -> None:
    fields: dict[str, Any] = {"archived": [], "answers": [], "deliveries": []}
    history = good(**fields, commits={1: commits}, losses=LOSSES)
    keep_what_is_there(history, {})
    assert history.lost == set()
    assert check(history)["1 nothing lost"] == ["message 1 was committed and is gone"]


def test_what_one_failover_has_lost_is_not_delivered_after_it() -> None:
    fields: dict[str, Any] = {"archived": [], "answers": []}
    second = Loss(4.0, down=6.0, end=7.0)
    found = broken_after({}, **fields, deliveries=[AFTERWARDS], losses=[*LOSSES, second])
    assert "1 nothing lost" in found


def test_an_unanswered_commit_is_known_by_its_row() -> None:
    assert broken_after({1: "plain"}, committed={}, unknown={1}) == set()
    assert broken_after({}, committed={}, unknown={1}) >= {"1 nothing lost"}


def test_a_delivery_that_was_lost_is_given_again() -> None:
    both = [CLAIMED, AFTERWARDS]
    assert broken_after({1: "plain"}, deliveries=both, losses=LOSSES) == set()
    assert broken_after({1: "plain"}, deliveries=both) >= {"3 stale workers change nothing"}


@pytest.mark.parametrize(("queue", "attempts"), [("plain", 1), ("once", 1)])
def test_a_message_whose_outcome_was_lost_is_started_again(queue: str, attempts: int) -> None:
    first = replace(CLAIMED, queue=queue)
    again = replace(AGAIN, queue=queue, at=9.0, claimed=8.9, ended_at=9.5)
    ended = row(queue=queue, deliveries_count=2, attempts_count=attempts)
    fields: dict[str, Any] = {
        "committed": {1: queue},
        "deliveries": [first, again],
        "archived": [ended],
        "answers": [] if queue == "once" else [ANSWER],
    }
    assert broken_after({1: queue}, **fields, losses=LOSSES) == set()
    later = [Loss(6.0, down=6.5, end=7.0)]
    rule = "4 at most once" if queue == "once" else "2 no repeat without a reason"
    assert rule in broken_after({1: queue}, **fields, losses=later)


def test_no_loss_excuses_a_failure_without_a_cause() -> None:
    failed = [row(state="FAILED", reason="transaction_ended")]
    found = broken_after({1: "plain"}, archived=failed, deliveries=[CLAIMED], losses=LOSSES)
    assert "8 no FAILED without a cause" in found


@pytest.mark.parametrize("business", [{1: "plain"}, {}])
def test_a_delivery_that_one_server_has_given_twice_is_a_finding(business: dict[int, str]) -> None:
    twice = [CLAIMED, replace(CLAIMED, pid=8, at=1.2, claimed=1.1)]
    fields: dict[str, Any] = {"deliveries": twice, "losses": LOSSES}
    if not business:
        fields |= {"archived": [], "answers": []}
    rule = "3 stale workers change nothing"
    assert rule in broken_after(business, **fields)
    twice[1] = replace(twice[1], claimed=2.5)  # the new primary may have given it
    assert rule not in broken_after(business, **fields)
    twice.append(replace(twice[1], pid=9, at=3.6, claimed=3.5))  # but not two times
    assert rule in broken_after(business, **fields)


GIVEN_AGAIN = {5: {1, 2}}


def test_a_report_excuses_only_deliveries_of_its_process() -> None:
    """After a failover message 2 has the row that message 1 had."""
    mine, other = (replace(AFTERWARDS, number=2, row=5, pid=pid, at=pid) for pid in (8, 9))
    history = good(deliveries=[replace(mine, lost=True), other], rows=GIVEN_AGAIN, losses=LOSSES)
    keep_what_is_there(history, {1: "plain", 2: "plain"})
    assert [d.unknown for d in history.deliveries] == [True, False]
    history = good(deliveries=[mine, other], rows=GIVEN_AGAIN, losses=LOSSES)
    keep_what_is_there(history, {1: "plain", 2: "plain"})
    assert not any(d.unknown for d in history.deliveries)


@pytest.mark.parametrize(
    ("ended_at", "stalls", "touched"),
    [
        (2.5, [], False),
        (3.5, [], True),
        (2.5, [Stall(2.0, 4.0, 7)], True),
        (2.5, [Stall(2.0, 4.0, 8)], False),
        (2.5, [Stall(4.6, 9.0)], False),
    ],
)
def test_an_outcome_is_written_within_the_lease_unless_all_stands_still(
    ended_at: float, stalls: list[Stall], touched: bool
) -> None:
    history = good(lease=2.0, stalls=stalls)
    loss = Loss(5.0, down=6.0, end=7.0)
    assert is_touched(replace(FIRST, ended_at=ended_at), history, [loss]) is touched
