"""The check of a throttle's starts finds what it is there for."""

import pytest

from tests.processes import policy_checks as checks
from tests.processes.policy_checks import SECOND, Left
from tests.processes.policy_worker import Start

MAX_LAG = SECOND // 10


def start(slot: int, looked: int | None, doubt: int = 0) -> Start:
    return Start(
        "q",
        slot,
        None,
        1,
        0,
        slot,
        slot,
        slot,
        monotonic=0.0,
        clock=0.0,
        looked=looked,
        doubt=doubt,
    )


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ([start(0, MAX_LAG)], ""),
        ([start(0, MAX_LAG + 11)], "was let go"),
        ([start(0, None)], "without a look"),
        # The claim has read the clock slowly.
        ([start(0, 200_000, doubt=200_000)], ""),
        ([start(0, 200_011, doubt=200_000)], "was let go"),
        ([start(0, MAX_LAG - 30_000 + 11, doubt=30_000)], "was let go"),
        ([start(0, 99_000), start(500_000, 550_000), start(SECOND, SECOND)], ""),
        ([start(0, 99_000), start(500_000, 550_000), start(SECOND - 1, SECOND)], "3 slots"),
        ([start(0, 99_000), start(500_000, 550_000), start(SECOND, 990_000)], "3 starts"),
    ],
)
def test_a_start_after_its_slot_is_found(starts: list[Start], found: str) -> None:
    wrong = checks.throttled(Left([], starts, []), 2, SECOND, max_lag=MAX_LAG)
    assert found in "".join(wrong)
    assert bool(wrong) is bool(found)
