"""Weighted queues, without a database: what is claimed follows the weights."""

from collections import Counter
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair
from faststream_sqlbroker.flow.deliver.claim import StrideScheduler

AT = datetime(2024, 1, 1, tzinfo=timezone.utc)
TOKEN = uuid4()


def row(queue: str) -> ClaimedMessage:
    return ClaimedMessage(1, queue, b"", {}, 0, None, 0, 1, 1, AT, AT, None, None, None, AT, TOKEN)


class Source:
    """Queues with so many messages, claimed from in the order asked for, as databases do."""

    def __init__(self, weights: dict[str, int], **waiting: int) -> None:
        self.shares = StrideScheduler(list(weights), list(weights.values()))
        self.waiting = Counter(waiting)
        self.claimed: Counter[str] = Counter()

    def claim(self, limit: int, known: Any = None) -> list[str]:
        """The queues of the messages of one claim."""
        queues = [q for q in self.waiting if self.waiting[q] > 0] if known is None else known
        pairs = self.shares.sort_pairs([ReadyPair(q, p, 0.0) for q in queues for p in (1, 0)])
        assert [p.priority for p in pairs] == [1, 0] * len(queues)
        got: list[str] = []
        for pair in pairs[::2]:
            count = min(limit - len(got), self.waiting[pair.queue])
            self.waiting[pair.queue] -= count
            got += [pair.queue] * count
        self.shares.record_claimed(
            [p.queue for p in pairs], [row(q) for q in got], has_more=len(got) == limit
        )
        self.claimed.update(got)
        return got


def test_a_flood_does_not_starve_the_low_queue() -> None:
    """Z2: one message a claim, and the high queue never empty."""
    source = Source({"high": 5, "low": 1}, high=10_000, low=10_000)
    order = [source.claim(1)[0] for _ in range(600)]
    assert Counter(order) == {"high": 500, "low": 100}
    for start in range(0, 600, 6):
        assert order[start : start + 6].count("low") == 1


def test_what_went_back_has_used_no_turn() -> None:
    """Z2: such as the messages that have missed the slot of a Throttle."""
    source = Source({"high": 4, "low": 1}, high=1000, low=1000)
    kept: Counter[str] = Counter()
    for n in range(200):
        got = Counter(source.claim(5))
        if n % 4 == 0:
            kept.update(got)
        else:
            source.shares.record_released(got)
    assert abs(kept["high"] - 4 * kept["low"]) <= 5, kept


def test_large_claims_take_turns() -> None:
    source = Source({"high": 5, "low": 1}, high=10_000, low=10_000)
    for _ in range(60):
        source.claim(100)
    assert source.claimed == {"high": 5_000, "low": 1_000}


def test_a_queue_without_messages_leaves_its_share() -> None:
    source = Source({"high": 5, "low": 1}, high=0, low=100)
    assert source.claim(10) == ["low"] * 10
    source.waiting["high"] = 3
    assert sorted(source.claim(10)) == ["high"] * 3 + ["low"] * 7


@pytest.mark.parametrize("known", [None, ["high", "low"]])
def test_turns_are_not_saved_up(known: list[str] | None) -> None:
    source = Source({"high": 1, "low": 1}, high=10_000)
    for _ in range(500):
        source.claim(1, known)
    source.waiting["low"] = 10_000
    source.claimed.clear()
    for _ in range(20):
        source.claim(1, known)
    assert abs(source.claimed["high"] - source.claimed["low"]) <= 2


def test_claims_without_competition_are_no_debt() -> None:
    source = Source({"high": 1, "low": 1}, high=0, low=10_000)
    for _ in range(500):
        source.claim(1)
    source.waiting["high"] = 10_000
    source.claimed.clear()
    for _ in range(20):
        source.claim(1)
    assert abs(source.claimed["high"] - source.claimed["low"]) <= 2


@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=5),
    st.lists(st.integers(1, 50), min_size=1, max_size=120),
)
def test_shares_are_exact_to_one_claim(weights: list[int], limits: list[int]) -> None:
    """While all have messages: what each has got, over its weight, differs by one claim's worth at
    most."""
    names = {f"q{n}": weight for n, weight in enumerate(weights)}
    source = Source(names, **dict.fromkeys(names, 10**6))
    for limit in limits:
        source.claim(limit)
    paid = [source.claimed[name] / weight for name, weight in names.items()]
    assert max(paid) - min(paid) <= max(limits) / min(weights) + 1e-6


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 10)), max_size=60),
)
def test_no_queue_waits_for_long(weights: list[int], steps: list[tuple[int, int, int]]) -> None:
    """Whatever came before, a queue with messages is served within a bounded number of claims."""
    names = {f"q{n}": weight for n, weight in enumerate(weights)}
    source = Source(names, **dict.fromkeys(names, 0))
    for which, count, limit in steps:
        source.waiting[f"q{which % len(names)}"] += count
        source.claim(limit)
    for name in names:
        source.waiting[name] = 10**6
    first = {source.claim(1)[0] for _ in range(10 * sum(weights) * max(weights) + 10)}
    assert first == set(names)


def test_a_thousand_queues_take_no_linear_search() -> None:
    """Names are compared where they are hashed alike, and not with each other."""

    class Name(str):
        __slots__ = ()
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

    names = [Name(n) for n in range(1000)]
    shares = StrideScheduler(names, [1] * 1000)
    again = [Name(n) for n in range(1000)]
    Name.compared = 0
    asked = shares.sort_pairs([ReadyPair(name, 0, 0.0) for name in again])
    shares.record_claimed(
        [pair.queue for pair in asked], [row(name) for name in again[-100:]], has_more=True
    )
    assert Name.compared < 20_000
