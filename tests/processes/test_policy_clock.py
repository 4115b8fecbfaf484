"""Policies go by the database's clock: a process whose own is an hour off delivers as the others
do."""

from datetime import timedelta

import pytest

from tests.helpers import eventually
from tests.processes import policy_checks as checks
from tests.processes.conftest import Fleet
from tests.processes.policy_checks import SECOND, micros
from tests.processes.policy_fleet import PolicyFleet
from tests.processes.test_clock import faketime

__all__ = ("faketime",)

OPENS = 8
"""Seconds from the beginning: workers are up by then."""


# In SQLite the process's clock is the database's.
@pytest.mark.parametrize(
    ("database", "shift"),
    [("postgresql", "-3600"), ("mariadb", "+3600"), ("mysql", "-3600")],
    indirect=["database"],
)
async def test_a_shifted_process_keeps_the_databases_time(
    fleet: Fleet, faketime: str, shift: str
) -> None:
    """Z7, Z10, P1, P6."""
    policies = PolicyFleet(fleet)
    now = await fleet.store.server.read_now()
    opens = now + timedelta(seconds=OPENS)
    closes = now + timedelta(seconds=OPENS + 600)
    given = {
        "delay": [["Delay", ["1s"], {}]],
        "debounce": [["Debounce", ["500ms"], {}]],
        "throttle": [["Throttle", [10, "1s"], {}]],
        "window": [["Window", [f"{opens:%H:%M:%S.%f}", f"{closes:%H:%M:%S.%f}"], {}]],
    }
    options = {"max_workers": 4, "max_fetch_interval": 0.25}
    subscribers = {
        queue: {"policies": wanted, "options": options} for queue, wanted in given.items()
    }
    env = {"LD_PRELOAD": faketime, "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    policies.start(subscribers, env=env)
    policies.start(subscribers, env=env)
    await policies.up(2)
    for _ in range(2):
        await policies.put(
            {
                "delay": [None] * 5,
                "debounce": ["a", "b", "c"] * 3,
                "throttle": [None] * 8,
                "window": [None],
            }
        )
        begun = await fleet.store.server.read_now()
        # A second burst of each key, when the first has ended.
        await eventually(lambda: _passed(fleet, begun + timedelta(seconds=1)))
    await fleet.settled(sum(map(len, policies.published.values())))
    await fleet.stop()
    left = await policies.left()
    for queue, found in left.items():
        states = "COMPLETED DISCARDED" if queue == "debounce" else "COMPLETED"
        assert not checks.nothing_lost(found, policies.published[queue], states)
        assert {round(s.clock - s.at / SECOND, -2) for s in found.starts} == {float(shift)}, (
            "it was not shifted"
        )
    assert not checks.delayed(left["delay"], SECOND)
    assert not checks.debounced(left["debounce"], SECOND // 2)
    assert len(left["debounce"].of("DISCARDED")) >= 12
    assert not checks.throttled(left["throttle"], 10, SECOND)
    assert not checks.in_window(left["window"], micros(opens), micros(closes))


async def _passed(fleet: Fleet, moment: object) -> bool:
    return await fleet.store.server.read_now() > moment
