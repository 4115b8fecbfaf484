"""Messages that may have killed their process run alone."""

from datetime import datetime, timezone
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.core.rows import SUSPECT_AFTER, ClaimedMessage
from faststream_sqlbroker.flow.isolation import ALONE, HOLD, PATIENCE, PAUSE, Isolation, Turn, lost_leases

NOW = datetime.now(timezone.utc)


def row(number: int, lost: int, attempts: int = 0) -> ClaimedMessage:
    return ClaimedMessage(
        number,
        "q",
        b"",
        {},
        0,
        None,
        attempts,
        attempts + lost + 1,
        1,
        NOW,
        NOW,
        None,
        None,
        None,
        NOW,
        uuid4(),
    )


def numbers(rows: object) -> list[int]:
    return [r.id for r in rows]  # type: ignore[attr-defined]


def test_retries_are_no_losses() -> None:
    assert lost_leases(row(1, 0, attempts=7)) == 0
    isolation = Isolation()
    assert numbers(isolation.sort_out([row(1, 1), row(2, 0, 9)], 0.0)) == [1, 2]
    assert isolation.turn(alone=True, now=0.0) is Turn.ANY
    assert not isolation.waits(0.0)


def test_a_suspect_waits_until_nothing_else_is_held() -> None:
    isolation = Isolation()
    assert numbers(isolation.sort_out([row(1, 2), row(2, 0), row(3, 5), row(4, 2)], 0.0)) == [2]
    assert isolation.waits(0.0)
    assert isolation.turn(alone=False, now=0.0) is Turn.DRAIN
    assert isolation.turn(alone=True, now=0.1) is Turn.SUSPECT
    assert isolation.next_suspect(0.1) == 1, "the fewest losses first"
    isolation.started(alone=True, now=0.1)
    assert isolation.turn(alone=False, now=1.0) is Turn.NONE, "it runs"
    assert isolation.turn(alone=True, now=3.0) is Turn.OTHERS, "then the rest has as long"
    isolation.sort_out([row(2, 0)], 3.0)
    assert isolation.turn(alone=False, now=5.8) is Turn.OTHERS
    assert isolation.turn(alone=False, now=6.0) is Turn.DRAIN
    assert isolation.turn(alone=True, now=6.1) is Turn.SUSPECT
    assert isolation.next_suspect(6.1) == 4
    assert isolation.next_suspect(6.1) == 3
    assert isolation.turn(alone=True, now=6.2) is Turn.ANY, "somebody else took it; none is known any more"


def test_when_there_is_no_rest_the_next_suspect_runs_at_once() -> None:
    isolation = Isolation()
    isolation.sort_out([row(1, 2), row(2, 2)], 0.0)
    isolation.next_suspect(0.0)
    isolation.started(alone=True, now=0.0)
    assert isolation.turn(alone=True, now=5.0) is Turn.OTHERS
    isolation.sort_out([], 5.0)
    assert isolation.waits(5.0)
    assert isolation.turn(alone=True, now=5.0) is Turn.SUSPECT


def test_the_rest_waits_a_bounded_time_for_a_suspect() -> None:
    isolation = Isolation()
    isolation.sort_out([row(1, 2), row(2, 2)], 0.0)
    isolation.next_suspect(0.0)
    isolation.started(alone=True, now=0.0)
    assert isolation.turn(alone=False, now=ALONE - 0.1) is Turn.NONE
    assert isolation.turn(alone=False, now=ALONE) is Turn.OTHERS
    assert isolation.turn(alone=False, now=2 * ALONE - 0.1) is Turn.OTHERS
    begin = 2 * ALONE
    assert isolation.turn(alone=False, now=begin) is Turn.DRAIN
    assert isolation.turn(alone=False, now=begin + HOLD - 0.1) is Turn.DRAIN
    assert isolation.turn(alone=False, now=begin + HOLD) is Turn.OTHERS
    assert not isolation.waits(begin + HOLD + 0.1)
    assert isolation.turn(alone=False, now=begin + HOLD + PAUSE - 0.1) is Turn.OTHERS
    assert isolation.turn(alone=False, now=begin + HOLD + PAUSE) is Turn.DRAIN


def test_suspects_that_never_get_the_process_to_themselves_run_in_company() -> None:
    """Each has its own patience: it is not asked of one after the other."""
    isolation = Isolation()
    isolation.sort_out([row(1, 2), row(2, 3), row(3, 2)], 0.0)
    isolation.sort_out([row(1, 2), row(4, 2)], 200.0)
    ran = []
    for now in (PATIENCE, PATIENCE + 1, PATIENCE + 2):
        assert isolation.turn(alone=False, now=now) is Turn.SUSPECT
        ran.append(isolation.next_suspect(now))
        isolation.started(alone=False, now=now)
    assert sorted(ran) == [1, 2, 3], "seen again, the first was no newer"
    assert isolation.turn(alone=False, now=PATIENCE + 3) is not Turn.SUSPECT
    assert isolation.turn(alone=False, now=200.0 + PATIENCE) is Turn.SUSPECT


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 30.0), st.integers(0, 4)), max_size=80))
def test_no_suspect_has_company_and_claims_never_stop_for_long(
    steps: list[tuple[bool, float, int]],
) -> None:
    """A model: each step says whether the process has become empty, how long it took, what is claimed."""
    isolation, now, blocked_since, number = Isolation(), 0.0, None, 0
    seen: dict[int, float] = {}
    for alone, passed, lost in steps:
        now += passed
        turn = isolation.turn(alone=alone, now=now)
        if turn in (Turn.NONE, Turn.DRAIN):
            blocked_since = now if blocked_since is None else blocked_since
            assert now - blocked_since < ALONE + HOLD
            continue
        blocked_since = None
        if turn is Turn.SUSPECT:
            chosen = isolation.next_suspect(now)
            assert alone or now - seen[chosen] >= PATIENCE
            isolation.started(alone=alone, now=now)
        else:
            number += 1
            claimed = [row(number, lost)] if turn is Turn.ANY else [row(number, 0)]
            seen[number] = now
            kept = isolation.sort_out(claimed, now)
            assert all(lost_leases(r) < SUSPECT_AFTER for r in kept)
