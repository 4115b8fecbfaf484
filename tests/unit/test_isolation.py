"""Messages that may have killed their process run alone."""

from datetime import datetime, timezone
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.flow.isolation import SUSPECT_AFTER, Isolation, lost_leases

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
    assert numbers(isolation.keep([row(1, 1), row(2, 0, 9)], alone=True)) == [1, 2]
    assert not isolation.hold


def test_a_suspect_waits_until_nothing_else_is_held() -> None:
    isolation = Isolation()
    rows = [row(1, 2), row(2, 0), row(3, 5)]
    assert numbers(isolation.keep(rows, alone=False)) == [2]
    assert isolation.hold
    assert numbers(isolation.keep(rows, alone=True)) == [1], "the fewest losses first"
    assert isolation.hold
    assert numbers(isolation.keep(rows, alone=True)) == [2], "every other claim is for the rest"
    assert numbers(isolation.keep([row(3, 5)], alone=True)) == [3]
    assert numbers(isolation.keep([row(3, 6)], alone=True)) == [3], "unless there is no rest"
    assert numbers(isolation.keep([row(4, 0)], alone=True)) == [4]
    assert not isolation.hold


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=12), st.booleans(), st.booleans())
def test_a_suspect_never_has_company(
    counts: list[tuple[int, int]], alone: bool, last_was_alone: bool
) -> None:
    isolation = Isolation()
    isolation._last_was_alone = last_was_alone
    rows = [row(n, lost, attempts) for n, (lost, attempts) in enumerate(counts)]
    kept = isolation.keep(rows, alone=alone)
    suspects = [r for r in kept if lost_leases(r) >= SUSPECT_AFTER]
    assert not suspects or (alone and list(kept) == suspects and len(suspects) == 1)
    assert isolation.hold == any(lost_leases(r) >= SUSPECT_AFTER for r in rows)
    if alone and rows:
        assert kept, "a process that holds nothing takes something"
