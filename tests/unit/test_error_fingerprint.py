"""What errors have in common: their type and the place that raised, not their text."""

import pytest

from faststream_sqlbroker.core.outcome import Ack, Nack, Reject
from faststream_sqlbroker.core.rows import Settlement
from faststream_sqlbroker.core.settle import (
    FINGERPRINT_LENGTH,
    SettleRules,
    compute_fingerprint,
    settle,
)
from tests.unit.test_settle import claimed


def refuse(number: int) -> None:
    raise ValueError(f"order {number} has no address")


def look_up(number: int) -> None:
    if number > 100:
        raise KeyError(number)
    refuse(number)


def other(number: int) -> None:
    raise ValueError(f"order {number} has no address")


def caught(function: object, number: int) -> BaseException:
    try:
        function(number)  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError


def test_the_text_and_the_line_do_not_count() -> None:
    assert compute_fingerprint(caught(refuse, 1)) == compute_fingerprint(caught(refuse, 2))
    deep = [compute_fingerprint(caught(look_up, number)) for number in (1, 2)]
    assert deep[0] == deep[1]
    assert len(deep[0]) == FINGERPRINT_LENGTH


def test_the_type_the_place_and_the_way_to_it_count() -> None:
    found = [
        compute_fingerprint(error)
        for error in (
            caught(refuse, 1),
            caught(look_up, 1),
            caught(look_up, 101),
            caught(other, 1),
            ValueError(),
            KeyError(),
        )
    ]
    assert len(set(found)) == len(found)


def test_only_the_last_frames_count() -> None:
    """So that one failure of a library is one group, whichever handler has met it."""

    def deeper(number: int, depth: int) -> None:
        deeper(number, depth - 1) if depth else refuse(number)

    found = {compute_fingerprint(caught(lambda n, d=d: deeper(n, d), 1)) for d in (3, 4, 90)}
    assert len(found) == 1


def test_members_of_a_group_count() -> None:
    groups = [
        ExceptionGroup("several", [caught(refuse, 1), ValueError()]),
        ExceptionGroup("others", [caught(refuse, 2), ValueError("x")]),
        ExceptionGroup("several", [caught(other, 1), ValueError()]),
    ]
    first, second, third = map(compute_fingerprint, groups)
    assert first == second != third


def test_an_error_that_cannot_be_read_has_one_too() -> None:
    class HostileError(Exception):
        @property
        def __traceback__(self) -> None:  # type: ignore[override]
            raise RuntimeError

    assert len(compute_fingerprint(HostileError())) == FINGERPRINT_LENGTH


@pytest.mark.parametrize("outcome", [Nack(error=ValueError("x")), Reject(None, ValueError("y"))])
def test_a_settlement_has_that_of_its_error(outcome: Nack | Reject) -> None:
    settled = settle(claimed(), outcome, SettleRules(), ended_after=0.0)
    assert settled.fingerprint == compute_fingerprint(ValueError())


def test_a_settlement_without_an_error_has_none() -> None:
    settled: Settlement = settle(claimed(), Ack(), SettleRules(), ended_after=0.0)
    assert settled.fingerprint is None
