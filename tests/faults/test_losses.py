"""What a failover has lost is no broken promise, and hides none."""

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.checker import check
from tests.faults.history import Loss
from tests.faults.losses import keep_what_is_there
from tests.faults.test_checker import AGAIN, ANSWER, FIRST, good, row

LOSSES = [Loss(0.5, 3.0)]
CLAIMED = replace(FIRST, claimed=0.9)
AFTERWARDS = replace(FIRST, pid=8, at=5.0, claimed=4.9, ended_at=5.5)


def broken_after(business: dict[int, str], **fields: Any) -> set[str]:
    """The rules that are broken when `business` is what the application finds."""
    history = good(**fields)
    keep_what_is_there(history, business)
    return {rule for rule, found in check(history).items() if found}


def test_a_message_that_the_database_has_lost_was_lost_by_it() -> None:
    history = good(archived=[], answers=[], deliveries=[CLAIMED], losses=LOSSES)
    keep_what_is_there(history, {})
    assert history.lost == {1}
    assert history.forgotten == [CLAIMED]
    assert not any(check(history).values())


def test_a_message_with_its_row_must_be_there() -> None:
    found = broken_after({1: "plain"}, archived=[], answers=[], deliveries=[], losses=LOSSES)
    assert found == {"1 nothing lost"}


def test_a_message_without_its_row_must_not_be_there() -> None:
    assert broken_after({}, losses=LOSSES, deliveries=[CLAIMED]) >= {"1 nothing lost"}


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
    later = [Loss(6.0, 7.0)]
    rule = "4 at most once" if queue == "once" else "2 no repeat without a reason"
    assert rule in broken_after({1: queue}, **fields, losses=later)


def test_no_loss_excuses_a_failure_without_a_cause() -> None:
    failed = [row(state="FAILED", reason="transaction_ended")]
    found = broken_after({1: "plain"}, archived=failed, deliveries=[CLAIMED], losses=LOSSES)
    assert "8 no FAILED without a cause" in found
