"""Debounce and KeepLast, with a process that is killed while the message of a burst starts."""

from datetime import timedelta
from typing import Any

import pytest

from tests.helpers import eventually
from tests.processes.conftest import Fleet
from tests.processes.policy_fleet import PolicyFleet

WINDOW = timedelta(milliseconds=200)
DEBOUNCE = ["Debounce", ["200ms"], {}]
LEADING = ["Debounce", ["200ms"], {"edge": "leading"}]
KEEP_LAST = ["KeepLast", ["200ms"], {}]
OPTIONS: dict[str, Any] = {
    "max_workers": 1,
    "max_fetch_interval": 0.1,
    "release_stuck_timeout": 60.0,
    "release_stuck_interval": 0.1,
}


async def burst(policies: PolicyFleet) -> list[int]:
    """Four messages of one key, whose burst is over; their ids."""
    await policies.put({"q": ["a"] * 4})
    ends = await policies.store.server.read_now() + WINDOW

    async def over() -> bool:
        return await policies.store.server.read_now() > ends

    await eventually(over)
    return policies.published["q"]


async def killed(fleet: Fleet, policies: PolicyFleet, policy: list[Any], dies: str) -> None:
    """A worker that kills itself where `dies` says has come and gone."""
    act, env = ("die_first", None) if dies == "in handler" else ("", {"TEST_WORKER_DIES": dies})
    subscribers = {"q": {"policies": [policy], "act": act, "options": OPTIONS}}
    await fleet.ended(policies.start(subscribers, env))


async def ends(fleet: Fleet, policies: PolicyFleet, policy: list[Any]) -> dict[int, Any]:
    """What becomes of all messages under the next worker: how often each was delivered, or its
    reason and the message that this is about."""
    policies.start({"q": {"policies": [policy], "options": OPTIONS}})
    await fleet.settled(len(policies.published["q"]))
    await fleet.stop()
    return {
        row["id"]: row["deliveries_count"]
        if row["state"] == "COMPLETED"
        else (row["reason"], row["related_id"])
        for row in await fleet.rows(archive=True)
    }


@pytest.mark.parametrize(
    ("policy", "dies", "deliveries"),
    [
        (DEBOUNCE, "before commit", 1),
        (DEBOUNCE, "after commit", 2),
        (DEBOUNCE, "in handler", 2),
        (LEADING, "in handler", 2),
        (KEEP_LAST, "in handler", 2),
    ],
)
async def test_the_message_of_a_burst_is_delivered_again(
    fleet: Fleet, policy: list[Any], dies: str, deliveries: int
) -> None:
    """Z7: the others are superseded with the claim that starts it, or not at all."""
    policies = PolicyFleet(fleet)
    ids = await burst(policies)
    await killed(fleet, policies, policy, dies)
    waiting = {row["id"] for row in await fleet.rows()}
    goes = ids[0] if policy is LEADING else ids[-1]
    assert waiting == (set(ids) if dies == "before commit" else {goes})
    found = await ends(fleet, policies, policy)
    others = dict.fromkeys(set(ids) - {goes}, ("superseded", goes))
    assert found == {goes: deliveries, **others}
    started = [start.id for start in policies.starts("q")]
    assert started == [goes] * (2 if dies == "in handler" else 1)


@pytest.mark.parametrize("policy", [DEBOUNCE, LEADING, KEEP_LAST])
async def test_another_message_of_the_burst_takes_its_place(
    fleet: Fleet, policy: list[Any]
) -> None:
    """Z7: a claim that was not committed has superseded nothing, and then its message is
    cancelled."""
    policies = PolicyFleet(fleet)
    ids = await burst(policies)
    await killed(fleet, policies, policy, "before commit")
    gone, goes = (ids[0], ids[1]) if policy is LEADING else (ids[-1], ids[-2])

    async def is_done() -> bool:
        # "busy" until the server has ended the killed process's transaction.
        return (await fleet.store.repairs.cancel(gone, "by hand")).verdict == "done"

    await eventually(is_done)
    found = await ends(fleet, policies, policy)
    others = dict.fromkeys(set(ids) - {gone, goes}, ("superseded", goes))
    assert found == {gone: ("cancelled", None), goes: 1, **others}
    assert [start.id for start in policies.starts("q")] == [goes]
