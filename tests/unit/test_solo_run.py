"""Messages that may have killed their process run alone."""

from datetime import datetime, timezone
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage
from faststream_sqlbroker.core.suspects import Suspect, Suspicion
from faststream_sqlbroker.flow.deliver.solo_run import (
    ALONE,
    SOLO_LIMIT,
    SOLO_PAUSE,
    SOLO_WAIT,
    SoloRuns,
    Turn,
)

NOW = datetime.now(timezone.utc)


def row(number: int, lost: int, attempts: int = 0) -> ClaimedMessage:
    """As it is found, before it is charged."""
    return ClaimedMessage(
        number,
        "q",
        b"",
        {},
        0,
        None,
        attempts,
        attempts + lost,
        1,
        NOW,
        NOW,
        None,
        None,
        None,
        NOW,
        uuid4(),
    )


def met(solo_runs: SoloRuns, now: float, *suspects: tuple[int, int]) -> None:
    """Suspects by number, with their losses; all have deliveries left."""
    solo_runs.met({number: Suspect(lost) for number, lost in suspects}, now)


def test_retries_are_no_losses() -> None:
    found = Claimed.without_suspects(
        [row(1, 1), row(2, 0, 9), row(3, 2), row(4, 3, 1)], Suspicion()
    )
    assert [r.id for r in found] == [1, 2]
    assert found.suspects == {3: Suspect(2), 4: Suspect(3)}
    untold = Claimed.without_suspects([row(1, 1), row(3, 2)], Suspicion().untold())
    assert ([r.id for r in untold], untold.suspects) == ([1], {})
    assert [r.id for r in Claimed.without_suspects([row(3, 2)], None)] == [3]


@pytest.mark.parametrize(
    ("limit", "deliveries", "attempts", "suspect"),
    [
        (None, 1, 0, None),
        (None, 2, 0, Suspect(2)),
        (None, 9, 8, None),
        (13, 1, 0, None),
        (13, 2, 0, Suspect(2)),
        (13, 12, 12, None),
        (13, 12, 0, Suspect(12, last=True)),
        (13, 13, 0, None),
        (13, 99, 87, Suspect(12, last=True)),
        (3, 1, 0, None),
        (3, 2, 0, Suspect(2, last=True)),
        (3, 2, 1, None),
        (3, 3, 1, Suspect(2, last=True)),
        (2, 0, 0, None),
        (2, 1, 0, Suspect(1, last=True)),
        (2, 1, 1, None),
        (2, 2, 0, None),
    ],
)
def test_f6_a_suspect_runs_alone(
    limit: int | None, deliveries: int, attempts: int, suspect: Suspect | None
) -> None:
    """From min(2, max_deliveries - 1) lost leases on; what is over the limit just ends."""
    suspicion = Suspicion.under(limit)
    assert suspicion is not None
    assert suspicion.of(deliveries - attempts) == suspect


def test_f6_with_one_delivery_nothing_runs_alone() -> None:
    assert Suspicion.under(1) is None


def test_a_suspect_waits_until_nothing_else_is_held() -> None:
    solo_runs = SoloRuns()
    assert solo_runs.turn(alone=True, now=0.0) is Turn.ANY
    assert not solo_runs.waits(0.0)
    met(solo_runs, 0.0, (1, 2), (3, 5), (4, 2))
    assert solo_runs.waits(0.0)
    assert solo_runs.turn(alone=False, now=0.0) is Turn.DRAIN
    assert solo_runs.turn(alone=True, now=0.1) is Turn.SUSPECT
    assert solo_runs.next_suspect(0.1, alone=True) == 1, "the fewest losses first"
    solo_runs.started(alone=True, now=0.1)
    assert solo_runs.turn(alone=False, now=1.0) is Turn.NONE, "it runs"
    assert solo_runs.turn(alone=True, now=3.0) is Turn.OTHERS, "then the rest has as long"
    assert solo_runs.turn(alone=False, now=5.8) is Turn.OTHERS
    assert solo_runs.turn(alone=False, now=6.0) is Turn.DRAIN
    assert solo_runs.turn(alone=True, now=6.1) is Turn.SUSPECT
    assert solo_runs.next_suspect(6.1, alone=True) == 4
    assert solo_runs.next_suspect(6.1, alone=True) == 3
    assert solo_runs.turn(alone=True, now=6.2) is Turn.ANY, (
        "another worker claimed it; none is known any more"
    )


def test_without_other_messages_the_next_suspect_runs_at_once() -> None:
    solo_runs = SoloRuns()
    met(solo_runs, 0.0, (1, 2), (2, 2))
    solo_runs.next_suspect(0.0, alone=True)
    solo_runs.started(alone=True, now=0.0)
    assert solo_runs.turn(alone=True, now=5.0) is Turn.OTHERS
    solo_runs.nothing_else(5.0)
    assert solo_runs.waits(5.0)
    assert solo_runs.turn(alone=True, now=5.0) is Turn.SUSPECT


def test_other_messages_wait_a_bounded_time_for_a_suspect() -> None:
    solo_runs = SoloRuns()
    met(solo_runs, 0.0, (1, 2), (2, 2))
    solo_runs.next_suspect(0.0, alone=True)
    solo_runs.started(alone=True, now=0.0)
    assert solo_runs.turn(alone=False, now=ALONE - 0.1) is Turn.NONE
    assert solo_runs.turn(alone=False, now=ALONE) is Turn.OTHERS
    assert solo_runs.turn(alone=False, now=2 * ALONE - 0.1) is Turn.OTHERS
    begin = 2 * ALONE
    assert solo_runs.turn(alone=False, now=begin) is Turn.DRAIN
    assert solo_runs.turn(alone=False, now=begin + SOLO_WAIT - 0.1) is Turn.DRAIN
    assert solo_runs.turn(alone=False, now=begin + SOLO_WAIT) is Turn.OTHERS
    assert not solo_runs.waits(begin + SOLO_WAIT + 0.1)
    assert solo_runs.turn(alone=False, now=begin + SOLO_WAIT + SOLO_PAUSE - 0.1) is Turn.OTHERS
    assert solo_runs.turn(alone=False, now=begin + SOLO_WAIT + SOLO_PAUSE) is Turn.DRAIN


def test_suspects_that_never_get_the_process_to_themselves_run_in_company() -> None:
    """Each has its own patience: it is not asked of one after the other."""
    solo_runs = SoloRuns()
    met(solo_runs, 0.0, (1, 2), (2, 3), (3, 2))
    met(solo_runs, 200.0, (1, 2), (4, 2))
    ran = []
    for now in (SOLO_LIMIT, SOLO_LIMIT + 1, SOLO_LIMIT + 2):
        assert solo_runs.turn(alone=False, now=now) is Turn.SUSPECT
        ran.append(solo_runs.next_suspect(now, alone=False))
        solo_runs.started(alone=False, now=now)
    assert sorted(ran) == [1, 2, 3], "seen again, the first was no newer"
    assert solo_runs.turn(alone=False, now=SOLO_LIMIT + 3) is not Turn.SUSPECT
    assert solo_runs.turn(alone=False, now=200.0 + SOLO_LIMIT) is Turn.SUSPECT


def test_f6_a_last_delivery_never_has_company_and_is_waited_for_longer_and_longer() -> None:
    """For half of the time at most: a handler that takes for ever must not stop the others."""
    solo_runs = SoloRuns()
    solo_runs.met({1: Suspect(2, last=True), 2: Suspect(2)}, 0.0)
    assert solo_runs.turn(alone=False, now=SOLO_LIMIT) is Turn.SUSPECT
    assert solo_runs.next_suspect(SOLO_LIMIT, alone=False) == 2
    now = SOLO_LIMIT + 1
    holds = []
    for _ in range(5):
        began = now
        while (turn := solo_runs.turn(alone=False, now=now)) is Turn.DRAIN:
            now += 0.5
        assert turn is Turn.OTHERS
        holds.append(now - began)
        began = now
        while solo_runs.turn(alone=False, now=now) is Turn.OTHERS:
            now += 0.5
        assert now - began >= max(SOLO_PAUSE, holds[-1])
        now += 0.0
    assert holds == [2 * SOLO_WAIT * 2**n for n in range(5)]
    assert solo_runs.turn(alone=True, now=now) is Turn.SUSPECT
    assert solo_runs.next_suspect(now, alone=True) == 1
    solo_runs.started(alone=True, now=now)
    assert solo_runs.turn(alone=True, now=now + 1) is Turn.ANY


@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0.0, 30.0), st.integers(0, 4), st.booleans()),
        max_size=80,
    )
)
def test_no_suspect_has_company_and_claims_never_stop_for_long(
    steps: list[tuple[bool, float, int, bool]],
) -> None:
    """A model: each step says whether the process has become empty, how long it took, what is
    claimed."""
    solo_runs = SoloRuns()
    now = 0.0
    blocked_since = None
    number = 0
    seen: dict[int, tuple[float, bool]] = {}
    for alone, passed, lost, last in steps:
        now += passed
        turn = solo_runs.turn(alone=alone, now=now)
        if turn in (Turn.NONE, Turn.DRAIN):
            blocked_since = now if blocked_since is None else blocked_since
            waiting = [at for at, final in seen.values() if final and now - at >= SOLO_LIMIT]
            assert waiting or now - blocked_since < ALONE + SOLO_WAIT
            continue
        blocked_since = None
        if turn is Turn.SUSPECT:
            chosen = solo_runs.next_suspect(now, alone=alone)
            first, final = seen.pop(chosen)
            assert alone or (now - first >= SOLO_LIMIT and not final)
            solo_runs.started(alone=alone, now=now)
        elif turn is Turn.ANY and lost:
            number += 1
            seen[number] = now, last
            solo_runs.met({number: Suspect(lost, last)}, now)
