"""Once, with a process that is killed at one of the moments that matter."""

from collections import Counter, defaultdict
from itertools import count, islice
from typing import Any

import pytest

from tests.helpers import eventually
from tests.processes import policy_checks as checks
from tests.processes.conftest import Fleet
from tests.processes.policy_fleet import PolicyFleet

OPTIONS: dict[str, Any] = {
    "max_workers": 1,
    "max_fetch_interval": 0.1,
    "release_stuck_timeout": 60.0,
    "release_stuck_interval": 0.1,
}
ORDERS = 60
TENANTS = 3
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", [True, {"header": "order"}], ids=["publish", "header"])
async def test_orders_run_once_and_tenants_have_limits_when_processes_die(
    fleet: Fleet, key: Any
) -> None:
    """Each policy has its key: two of three processes are killed while they run handlers. No order
    starts twice, no tenant has a third lease, and each message has an end."""
    numbers = count()
    policies = PolicyFleet(
        fleet, lambda order: {"order": order, "tenant": f"t{int(order[1:]) % TENANTS}"}
    )
    subscribers = {
        "q": {
            "policies": [
                ["Concurrency", [2], {"per_key": {"header": "tenant"}}],
                ["Once", ["1h"], {"key": key}],
            ],
            "seconds": 0.1,
            "options": {**OPTIONS, "max_workers": 5, "release_stuck_timeout": 5.0},
        }
    }

    def work(orders: int = 3) -> dict[str, list[str]]:
        """Two messages of each of so many orders."""
        return {"q": [f"o{n}" for n in islice(numbers, orders) for _ in range(2)]}

    await policies.put(work(ORDERS))
    workers = [policies.start(subscribers) for _ in range(3)]
    for starts in (10, 20):
        await eventually(lambda least=starts: len(policies.starts("q")) >= least, timeout=120)
        workers.remove(await policies.kill_at_work(workers, work))
    await policies.put(work())
    published = policies.published["q"]
    await fleet.settled(len(published))
    await fleet.stop()
    rows = await fleet.rows(archive=True)
    unknown = {each.message_id for each in await fleet.store.ack_first_starts.list_unknown("q", 99)}
    assert {row["id"] for row in rows} == set(published)
    ends = Counter((row["state"], row["reason"]) for row in rows)
    assert set(ends) <= {
        ("COMPLETED", None),
        ("DISCARDED", "duplicate"),
        ("FAILED", "unknown_outcome"),
    }
    assert ends["DISCARDED", "duplicate"] == len(published) // 2
    assert {row["id"] for row in rows if row["state"] == "FAILED"} == unknown
    assert unknown, "no handler was killed"
    starts_of = Counter(start.key for start in policies.starts("q"))
    assert max(starts_of.values()) == 1, starts_of
    by_tenant = defaultdict(list)
    for row in rows:
        by_tenant[row["policy_key"]].append(row)
    assert set(by_tenant) == {f"t{n}" for n in range(TENANTS)}
    assert all(checks.most_at_once(of_tenant) <= 2 for of_tenant in by_tenant.values())
