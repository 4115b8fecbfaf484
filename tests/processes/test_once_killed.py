"""Once, with a process that is killed at one of the moments that matter."""

from typing import Any

import pytest

from tests.processes.conftest import Fleet
from tests.processes.policy_fleet import PolicyFleet

OPTIONS: dict[str, Any] = {
    "max_workers": 1,
    "max_fetch_interval": 0.1,
    "release_stuck_timeout": 60.0,
    "release_stuck_interval": 0.1,
}
SUBSCRIBERS: dict[str, Any] = {
    "q": {"policies": [["Once", ["1h"], {}]], "act": "retry_first", "options": OPTIONS}
}


@pytest.mark.parametrize(
    ("dies", "starts_before", "tried_again"),
    [
        ("after claim_keys", 0, False),
        ("before release_keys", 1, False),
        ("after release_keys", 1, True),
    ],
)
async def test_messages_given_back_are_retried_and_the_others_are_unknown(
    fleet: Fleet, dies: str, starts_before: int, tried_again: bool
) -> None:
    """Z4: the key of a handler that asked for another try is free from the moment that it was given
    back."""
    policies = PolicyFleet(fleet)
    if fleet.store.dialect_name == "postgresql":
        dies = dies.replace("claim_keys", "claim_free_keys")  # it claims free keys by this
    await policies.put({"q": ["a"]})
    victim = policies.start(SUBSCRIBERS, {"TEST_WORKER_DIES": dies})
    await fleet.ended(victim)
    assert len(policies.starts("q")) == starts_before
    [row] = await fleet.rows()
    assert row["state"] == "PROCESSING"
    policies.start(SUBSCRIBERS)
    await fleet.settled(1)
    await policies.put({"q": ["a"]})
    await fleet.settled(2)
    await fleet.stop()
    first, second = await fleet.rows(archive=True)
    listed = {each.message_id for each in await fleet.store.ack_first_starts.list_unknown("q", 10)}
    assert (second["reason"], second["related_id"]) == ("duplicate", first["id"])
    if tried_again:
        assert (first["state"], listed) == ("COMPLETED", set())
        # The crash was no attempt, so that the handler asked once more.
        assert len(policies.starts("q")) == starts_before + 2
    else:
        assert (first["state"], first["reason"]) == ("FAILED", "unknown_outcome")
        assert (listed, len(policies.starts("q"))) == ({first["id"]}, starts_before)
