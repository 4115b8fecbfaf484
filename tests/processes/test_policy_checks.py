"""The check of a throttle's starts finds what it is there for."""

import pytest

from tests.processes import policy_checks as checks
from tests.processes.policy_checks import SECOND, Left
from tests.processes.policy_worker import Start


def start(slot: int, looked: int | None) -> Start:
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
    )


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ([start(0, 99_000)], ""),
        ([start(0, None)], "without a look"),
        ([start(0, 99_000), start(500_000, 550_000), start(SECOND, SECOND + 99_001)], ""),
        ([start(0, 99_000), start(500_000, 550_000), start(SECOND, SECOND)], "3 starts"),
    ],
)
def test_a_start_too_many_is_found(starts: list[Start], found: str) -> None:
    wrong = checks.throttled(Left([], starts, []), 2, SECOND)
    assert found in "".join(wrong)
    assert bool(wrong) is bool(found)
