"""What a subscriber tells of what it has ended, and the rates that are worked out of it."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.ended import EndedCounts, compute_rate, parse_rates, sum_rates
from faststream_sqlbroker.core.rows import AckSettlement, Settlement
from faststream_sqlbroker.core.states import MessageState


class Row:
    """As much of a claimed message as is looked at."""

    def __init__(self, queue: str) -> None:
        self.queue = queue


def acks(count: int) -> list[Settlement]:
    return [AckSettlement(n, uuid4(), 0.0, True) for n in range(count)]


def write(ended: EndedCounts, parts: Sequence[Settlement], queue: str = "q") -> None:
    held: Any = {part.id: Row(queue) for part in parts}
    ended.record_settled(parts, {part.id for part in parts}, held)


def test_a_rate_is_that_of_the_time_that_was_read() -> None:
    assert compute_rate(30, seconds=60) == 30.0
    assert compute_rate(10_000, seconds=12) == 50_000.0
    assert compute_rate(1, seconds=0) == 60_000.0


@pytest.mark.parametrize("queues", [("q",), ("q", "other")])
def test_only_what_leaves_the_queue_and_is_written_is_counted(queues: tuple[str, ...]) -> None:
    ended = EndedCounts(queues, 0.0)
    token = uuid4()
    parts = [
        AckSettlement(1, token, 0.0, True),
        Settlement(2, token, MessageState.FAILED),
        Settlement(3, token, MessageState.DISCARDED, archive=False),
        Settlement(4, token, MessageState.RETRYABLE),
        Settlement(5, token, MessageState.PENDING, queue="dead"),
        AckSettlement(6, token, 0.0, True),
    ]
    held: Any = {part.id: Row("q") for part in parts}
    ended.record_settled(parts, {1, 2, 3, 4, 5}, held)
    assert ended.take_report(30.0) == {"seconds": 30.0, "queues": {"q": 3}}


def test_a_subscriber_of_several_queues_tells_each() -> None:
    ended = EndedCounts(("a", "b", "c"), 0.0)
    write(ended, acks(2), "a")
    write(ended, acks(3), "b")
    assert ended.take_report(60.0)["queues"] == {"a": 2, "b": 3}


def test_what_has_just_started_counts_as_one_that_has_run_for_five_seconds() -> None:
    ended = EndedCounts(("q",), 100.0)
    assert ended.take_report(100.0) == {}
    write(ended, acks(1))
    assert parse_rates(ended.take_report(100.1)) == {"q": 12.0}


def test_what_ended_a_minute_ago_is_told_no_more() -> None:
    """A sign of life every five seconds: 10 messages before each for a minute, then none."""
    ended = EndedCounts(("q",), 0.0)
    told = []
    for second in range(5, 130, 5):
        if second <= 60:
            write(ended, acks(10))
        told.append(parse_rates(ended.take_report(float(second))))
    assert told[11] == {"q": 120.0}
    assert told[17] == {"q": 60.0}
    assert told[-1] == {}


def test_signs_of_life_in_quick_succession_keep_few_counts() -> None:
    ended = EndedCounts(("q",), 0.0)
    for tenth in range(6_000):
        write(ended, acks(1))
        ended.take_report(tenth / 10)
    assert len(ended._snapshots) <= 62
    assert parse_rates(ended.take_report(600.0)) == {"q": pytest.approx(600.0, rel=0.05)}


def test_an_older_subscriber_makes_the_sum_of_its_queues_unknown() -> None:
    assert parse_rates(None) is None
    assert parse_rates({}) == {}
    found = sum_rates(
        [
            (("a", "b"), {"a": 1.5}),
            (("a",), {"a": 2.0}),
            (("b", "c"), None),
            (("d",), {}),
        ]
    )
    assert found == {"a": 3.5, "d": 0.0}
