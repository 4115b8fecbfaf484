"""Debounce's bursts, against a model of its definition (Z7)."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Debounce
from faststream_sqlbroker.core.policies.debounce import Bursts, add_to_bursts
from tests.policies.bursts import Arrival, partition

SECOND = 1_000_000


@st.composite
def policies(draw: st.DrawFn) -> Debounce:
    window = draw(st.integers(1, 6)) / SECOND
    if draw(st.booleans()):
        return Debounce(window, edge="leading")
    most = draw(st.none() | st.integers(0, 12))
    return Debounce(window, max_wait=None if most is None else window + most / SECOND)


arrivals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 60)), max_size=25, unique_by=lambda a: a[1]
)
"""Times are few, so that they meet the ends of bursts; ids need not come in the order of times
(delays)."""


class Fed:
    """The results of `take` so far, over as many claims as there are chunks."""

    def __init__(self, policy: Debounce) -> None:
        self.policy = policy
        self.stored = Bursts().dump()
        self.due = dict[int, int]()
        self.superseded: dict[int, int] = {}
        self.gone = set[int]()
        """What is superseded, or stands by."""

    def feed(self, chunk: Sequence[Arrival]) -> None:
        bursts = Bursts.load(json.loads(json.dumps(self.stored)))
        taken = add_to_bursts(self.policy, bursts, chunk)
        assert not set(taken.due) & set(taken.superseded), "it both stays and goes"
        assert not set(taken.superseded) & set(self.superseded), "it has gone twice"
        assert not set(taken.standby) & set(taken.due), "it both stays and stands by"
        assert not set(taken.standby) & (set(taken.superseded) | self.gone)
        self.superseded |= taken.superseded
        self.gone |= {*taken.superseded, *taken.standby}
        self.due = {i: at for i, at in (self.due | taken.due).items() if i not in self.gone}
        self.stored = bursts.dump()

    @property
    def order(self) -> list[int]:
        return Bursts.load(self.stored).list_messages()


def chunked(data: st.DataObject, everything: Sequence[Arrival]) -> list[Sequence[Arrival]]:
    cuts = data.draw(
        st.lists(st.integers(0, len(everything)), max_size=6).map(sorted), label="cuts"
    )
    return [everything[a:b] for a, b in zip([0, *cuts], [*cuts, len(everything)], strict=True)]


@settings(deadline=None, max_examples=300)
@given(policies(), arrivals, st.data())
def test_bursts_do_not_depend_on_when_claims_run(
    policy: Debounce, given_arrivals: list[Arrival], data: st.DataObject
) -> None:
    """In any chunks: the same messages stay, in the same order and due at the same time; the others
    stand by."""
    everything = sorted(given_arrivals)
    fed = Fed(policy)
    for chunk in chunked(data, everything):
        fed.feed(chunk)
    bursts = partition(policy, everything)
    assert fed.order == [burst.chosen for burst in bursts]
    assert fed.due == {burst.chosen: burst.due for burst in bursts}
    assert fed.gone == {message for burst in bursts for message in burst.gone}
    assert not fed.superseded, "nothing has started"


@settings(deadline=None, max_examples=200)
@given(policies(), arrivals, st.data())
def test_a_late_arrival_belongs_to_the_burst_of_its_time(
    policy: Debounce, given_arrivals: list[Arrival], data: st.DataObject
) -> None:
    """Chunks whose times overlap: a commit was late. No message is lost or counted twice."""
    chunks = [sorted(chunk) for chunk in chunked(data, data.draw(st.permutations(given_arrivals)))]
    fed = Fed(policy)
    for chunk in chunks:
        fed.feed(chunk)
    bursts = partition(policy, [arrival for chunk in chunks for arrival in chunk])
    assert fed.order == [burst.chosen for burst in bursts]
    assert fed.due == {burst.chosen: burst.due for burst in bursts}
    assert fed.gone == {message for burst in bursts for message in burst.gone}


@settings(deadline=None, max_examples=200)
@given(policies(), arrivals, st.data())
def test_a_delivered_message_has_left_its_burst(
    policy: Debounce, given_arrivals: list[Arrival], data: st.DataObject
) -> None:
    """A delivered message has left its burst: what comes later neither replaces it nor is replaced
    by it."""
    assume(given_arrivals)
    live = {message for _, message in given_arrivals}
    fed = Fed(policy)
    delivered = list[int]()
    for chunk in chunked(data, sorted(given_arrivals)):
        fed.feed(chunk)
        live -= fed.gone
        now = max((at for at, _ in chunk), default=0)
        bursts = Bursts.load(fed.stored)
        turn = bursts.find_next(live)
        if turn is not None and turn not in delivered and fed.due[turn] <= now:
            bursts.record_delivery(turn)
            delivered.append(turn)
            assert bursts.find_next(live) == turn, "the next waits while it lives"
            if data.draw(st.booleans(), label="settled"):
                live.discard(turn)
        fed.stored = bursts.dump()
    assert not set(delivered) & fed.gone
    # Each message is one of: superseded, delivered, or still to come, once.
    waiting = [message for message in fed.order if message not in delivered]
    parts = [*fed.gone, *delivered, *waiting]
    assert sorted(parts) == sorted(message for _, message in given_arrivals)


@pytest.mark.parametrize("edge", ["trailing", "leading"])
def test_a_message_at_the_very_end_of_a_burst_is_in_it(edge: Any) -> None:
    policy = Debounce(10 / SECOND, edge=edge)
    fed = Fed(policy)
    fed.feed([(0, 1), (10, 2), (policy.end(0, 10) + 1, 3)])
    assert fed.gone == {1 if edge == "trailing" else 2}


@pytest.mark.parametrize("info", [None, 5, "start", [1]])
def test_an_invalid_state_counts_as_unknown(info: object) -> None:
    assert Bursts.load(info) == Bursts()
