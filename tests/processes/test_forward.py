"""Chains of forwarding subscribers in real processes, some of which are killed."""

import pytest

from tests.helpers import eventually
from tests.processes.conftest import Fleet

MANY = 2_000
SEARCHING = {"release_stuck_timeout": 60.0, "release_stuck_interval": 0.3}
FORWARDS = {"a": "b", "b": "c", "c": "q"}

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.capability(
        "chains of queues: no message lost or doubled by SIGKILL between the steps"
    ),
]


async def test_killed_processes_lose_and_double_nothing(fleet: Fleet) -> None:
    """Z12 and M6: each message is in one queue at a time, whenever a process dies."""
    await fleet.publish(MANY, "a")
    ids = {row["id"] for row in await fleet.rows()}
    assert len(ids) == MANY
    victims = [fleet.start(forwards=FORWARDS, **SEARCHING) for _ in range(2)]
    # One while messages are under way everywhere, the other in the middle of its handlers.
    await eventually(lambda: sum(fleet.total().values()) > 200)
    victims[0].kill()
    await eventually(lambda: sum(fleet.total().values()) > 1_000)
    victims[1].kill()
    for _ in range(2):
        fleet.start(forwards=FORWARDS, **SEARCHING)
    await fleet.settled(MANY)
    await fleet.stop()
    assert {row["id"] for row in await fleet.rows(archive=True)} == ids
    assert set(fleet.total()) == set(range(MANY))
    done = "state = 'COMPLETED' AND queue = 'q' AND publish_count = 1"
    assert await fleet.count(done, archive=True) == MANY
