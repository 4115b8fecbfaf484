"""Messages that may have killed their process run alone."""

from datetime import datetime, timezone
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.core.rows import ClaimedMessage, ClaimedMessages
from faststream_sqlbroker.core.suspects import Suspect, SuspectRule
from faststream_sqlbroker.flow.deliver.solo_run import (
    MAX_SOLO_TIME,
    SOLO_LIMIT,
    SOLO_PAUSE,
    SOLO_WAIT,
    ClaimTarget,
    SoloScheduler,
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


def met(solo_runs: SoloScheduler, now: float, *suspects: tuple[int, int]) -> None:
    """Suspects by number, with their losses; all have deliveries left."""
    solo_runs.add_suspects({number: Suspect(lost) for number, lost in suspects}, now)


def test_retries_are_no_losses() -> None:
    found = ClaimedMessages.from_rows(
        [row(1, 1), row(2, 0, 9), row(3, 2), row(4, 3, 1)], SuspectRule()
    )
    assert [r.id for r in found] == [1, 2]
    assert found.suspects == {3: Suspect(2), 4: Suspect(3)}
    untold = ClaimedMessages.from_rows([row(1, 1), row(3, 2)], SuspectRule().as_silent())
    assert ([r.id for r in untold], untold.suspects) == ([1], {})
    assert [r.id for r in ClaimedMessages.from_rows([row(3, 2)], None)] == [3]


@pytest.mark.parametrize(
    ("limit", "deliveries", "attempts", "suspect"),
    [
        (None, 1, 0, None),
        (None, 2, 0, Suspect(2)),
        (None, 9, 8, None),
        (13, 1, 0, None),
        (13, 2, 0, Suspect(2)),
        (13, 12, 12, None),
        (13, 12, 0, Suspect(12, is_last=True)),
        (13, 13, 0, None),
        (13, 99, 87, Suspect(12, is_last=True)),
        (3, 1, 0, None),
        (3, 2, 0, Suspect(2, is_last=True)),
        (3, 2, 1, None),
        (3, 3, 1, Suspect(2, is_last=True)),
        (2, 0, 0, None),
        (2, 1, 0, Suspect(1, is_last=True)),
        (2, 1, 1, None),
        (2, 2, 0, None),
    ],
)
def test_f6_a_suspect_runs_alone(
    limit: int | None, deliveries: int, attempts: int, suspect: Suspect | None
) -> None:
    """From min(2, max_deliveries - 1) lost leases on; what is over the limit just ends."""
    suspicion = SuspectRule.from_max_deliveries(limit)
    assert suspicion is not None
    assert suspicion.classify(deliveries - attempts) == suspect


def test_f6_with_one_delivery_nothing_runs_alone() -> None:
    assert SuspectRule.from_max_deliveries(1) is None


def test_a_suspect_waits_until_nothing_else_is_held() -> None:
    solo_runs = SoloScheduler()
    assert solo_runs.choose_target(is_alone=True, now=0.0) is ClaimTarget.ANY
    assert not solo_runs.has_waiting(0.0)
    met(solo_runs, 0.0, (1, 2), (3, 5), (4, 2))
    assert solo_runs.has_waiting(0.0)
    assert solo_runs.choose_target(is_alone=False, now=0.0) is ClaimTarget.DRAIN
    assert solo_runs.choose_target(is_alone=True, now=0.1) is ClaimTarget.SUSPECT
    assert solo_runs.pop_suspect(0.1, is_alone=True) == 1, "the fewest losses first"
    solo_runs.record_start(is_alone=True, now=0.1)
    assert solo_runs.choose_target(is_alone=False, now=1.0) is ClaimTarget.NONE, "it runs"
    assert solo_runs.choose_target(is_alone=True, now=3.0) is ClaimTarget.OTHERS, (
        "then the rest has as long"
    )
    assert solo_runs.choose_target(is_alone=False, now=5.8) is ClaimTarget.OTHERS
    assert solo_runs.choose_target(is_alone=False, now=6.0) is ClaimTarget.DRAIN
    assert solo_runs.choose_target(is_alone=True, now=6.1) is ClaimTarget.SUSPECT
    assert solo_runs.pop_suspect(6.1, is_alone=True) == 4
    assert solo_runs.pop_suspect(6.1, is_alone=True) == 3
    assert solo_runs.choose_target(is_alone=True, now=6.2) is ClaimTarget.ANY, (
        "another worker claimed it; none is known any more"
    )


def test_without_other_messages_the_next_suspect_runs_at_once() -> None:
    solo_runs = SoloScheduler()
    met(solo_runs, 0.0, (1, 2), (2, 2))
    solo_runs.pop_suspect(0.0, is_alone=True)
    solo_runs.record_start(is_alone=True, now=0.0)
    assert solo_runs.choose_target(is_alone=True, now=5.0) is ClaimTarget.OTHERS
    solo_runs.skip_others(5.0)
    assert solo_runs.has_waiting(5.0)
    assert solo_runs.choose_target(is_alone=True, now=5.0) is ClaimTarget.SUSPECT


def test_other_messages_wait_a_bounded_time_for_a_suspect() -> None:
    solo_runs = SoloScheduler()
    met(solo_runs, 0.0, (1, 2), (2, 2))
    solo_runs.pop_suspect(0.0, is_alone=True)
    solo_runs.record_start(is_alone=True, now=0.0)
    assert solo_runs.choose_target(is_alone=False, now=MAX_SOLO_TIME - 0.1) is ClaimTarget.NONE
    assert solo_runs.choose_target(is_alone=False, now=MAX_SOLO_TIME) is ClaimTarget.OTHERS
    assert (
        solo_runs.choose_target(is_alone=False, now=2 * MAX_SOLO_TIME - 0.1) is ClaimTarget.OTHERS
    )
    begin = 2 * MAX_SOLO_TIME
    assert solo_runs.choose_target(is_alone=False, now=begin) is ClaimTarget.DRAIN
    assert solo_runs.choose_target(is_alone=False, now=begin + SOLO_WAIT - 0.1) is ClaimTarget.DRAIN
    assert solo_runs.choose_target(is_alone=False, now=begin + SOLO_WAIT) is ClaimTarget.OTHERS
    assert not solo_runs.has_waiting(begin + SOLO_WAIT + 0.1)
    assert (
        solo_runs.choose_target(is_alone=False, now=begin + SOLO_WAIT + SOLO_PAUSE - 0.1)
        is ClaimTarget.OTHERS
    )
    assert (
        solo_runs.choose_target(is_alone=False, now=begin + SOLO_WAIT + SOLO_PAUSE)
        is ClaimTarget.DRAIN
    )


def test_suspects_that_never_get_the_process_to_themselves_run_in_company() -> None:
    """Each has its own patience: it is not asked of one after the other."""
    solo_runs = SoloScheduler()
    met(solo_runs, 0.0, (1, 2), (2, 3), (3, 2))
    met(solo_runs, 200.0, (1, 2), (4, 2))
    ran = []
    for now in (SOLO_LIMIT, SOLO_LIMIT + 1, SOLO_LIMIT + 2):
        assert solo_runs.choose_target(is_alone=False, now=now) is ClaimTarget.SUSPECT
        ran.append(solo_runs.pop_suspect(now, is_alone=False))
        solo_runs.record_start(is_alone=False, now=now)
    assert sorted(ran) == [1, 2, 3], "seen again, the first was no newer"
    assert solo_runs.choose_target(is_alone=False, now=SOLO_LIMIT + 3) is not ClaimTarget.SUSPECT
    assert solo_runs.choose_target(is_alone=False, now=200.0 + SOLO_LIMIT) is ClaimTarget.SUSPECT


def test_f6_a_last_delivery_never_has_company_and_is_waited_for_longer_and_longer() -> None:
    """For half of the time at most: a handler that takes for ever must not stop the others."""
    solo_runs = SoloScheduler()
    solo_runs.add_suspects({1: Suspect(2, is_last=True), 2: Suspect(2)}, 0.0)
    assert solo_runs.choose_target(is_alone=False, now=SOLO_LIMIT) is ClaimTarget.SUSPECT
    assert solo_runs.pop_suspect(SOLO_LIMIT, is_alone=False) == 2
    now = SOLO_LIMIT + 1
    holds = []
    logged: list[int] = []
    for _ in range(5):
        began = now
        while (turn := solo_runs.choose_target(is_alone=False, now=now)) is ClaimTarget.DRAIN:
            now += 0.5
        assert turn is ClaimTarget.OTHERS
        assert solo_runs.choose_target(is_alone=False, now=now) is ClaimTarget.ANY
        logged += solo_runs.add_suspects({1: Suspect(2, is_last=True)}, now)
        holds.append(now - began)
        began = now
        while solo_runs.choose_target(is_alone=False, now=now) is ClaimTarget.OTHERS:
            now += 0.5
        assert now - began >= max(SOLO_PAUSE, holds[-1])
        now += 0.0
    assert holds == [2 * SOLO_WAIT * 2**n for n in range(5)]
    assert len(logged) <= now / SOLO_LIMIT, "a line in so many seconds"
    assert solo_runs.choose_target(is_alone=True, now=now) is ClaimTarget.SUSPECT
    assert solo_runs.pop_suspect(now, is_alone=True) == 1
    solo_runs.record_start(is_alone=True, now=now)
    assert solo_runs.choose_target(is_alone=True, now=now + 1) is ClaimTarget.ANY


def test_a_last_delivery_that_is_gone_is_not_waited_for_again() -> None:
    """Another process has handled it: the next claim does not report it."""
    solo_runs = SoloScheduler()
    solo_runs.add_suspects({1: Suspect(1, is_last=True)}, 0.0)
    now = SOLO_LIMIT
    assert solo_runs.choose_target(is_alone=False, now=now) is ClaimTarget.DRAIN
    now += 2 * SOLO_WAIT
    assert solo_runs.choose_target(is_alone=False, now=now) is ClaimTarget.OTHERS
    for seconds in (0.0, 2 * SOLO_PAUSE, 3600.0):
        assert solo_runs.choose_target(is_alone=False, now=now + seconds) is ClaimTarget.ANY


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
    solo_runs = SoloScheduler()
    now = 0.0
    blocked_since = None
    number = 0
    seen: dict[int, tuple[float, bool]] = {}
    for alone, passed, lost, last in steps:
        now += passed
        turn = solo_runs.choose_target(is_alone=alone, now=now)
        if turn in (ClaimTarget.NONE, ClaimTarget.DRAIN):
            blocked_since = now if blocked_since is None else blocked_since
            waiting = [at for at, final in seen.values() if final and now - at >= SOLO_LIMIT]
            assert waiting or now - blocked_since < MAX_SOLO_TIME + SOLO_WAIT
            continue
        blocked_since = None
        if turn is ClaimTarget.SUSPECT:
            chosen = solo_runs.pop_suspect(now, is_alone=alone)
            first, final = seen.pop(chosen)
            assert alone or (now - first >= SOLO_LIMIT and not final)
            solo_runs.record_start(is_alone=alone, now=now)
        elif turn is ClaimTarget.ANY and lost:
            number += 1
            seen[number] = now, last
            solo_runs.add_suspects({number: Suspect(lost, last)}, now)
