"""A backlog of bursts that is larger than one look keeps no complete key waiting (Z7)."""

import pytest

from faststream_sqlbroker.core.policies import Debounce, KeepLast, Policy
from tests.policies.world import World, outcome

SECOND = 1_000_000
LOOK = 10
KEYS = 15
EACH = 4
POLICIES: list[Policy] = [Debounce("1s"), Debounce("1s", edge="leading"), KeepLast("1s")]


@pytest.fixture(autouse=True)
def small_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rows", "intake"):
        monkeypatch.setattr(f"faststream_sqlbroker.database.policies.{module}.SCAN_SIZE", LOOK)


def deliver(world: World, limit: int) -> list[int]:
    """A claim whose handlers end at once."""
    rows = world.claim(0, limit).rows
    world.settle_all([(row, outcome("ack", 0)) for row in rows])
    return [row.id for row in rows]


def test_complete_keys_are_delivered_while_others_come_in(world: World) -> None:
    """And what arrives faster than it is looked at keeps no delivery from its turn."""
    for policy in POLICIES:
        the_first_claim_after_the_bursts_delivers(world, policy)
        faster_arrivals_do_not_starve_deliveries(world, policy)


def the_first_claim_after_the_bursts_delivers(world: World, policy: Policy) -> None:
    """Each key's messages are spread over the whole backlog."""
    world.begin([policy])
    ids = [world.put(f"k{n % KEYS}", ago=5 * SECOND, priority=n % 2) for n in range(KEYS * EACH)]
    leading = isinstance(policy, Debounce) and policy.edge == "leading"
    right = set(ids[:KEYS] if leading else ids[-KEYS:])
    delivered = deliver(world, 3)
    assert len(delivered) == 3
    for _ in range(KEYS + EACH * KEYS // LOOK):
        delivered += deliver(world, 3)
    assert sorted(delivered) == sorted(right)
    gone = {i: row["related_id"] for i, row in world.archived().items() if row["reason"]}
    assert set(gone) == set(ids) - right
    assert not world.live()


def faster_arrivals_do_not_starve_deliveries(world: World, policy: Policy) -> None:
    """Each claim looks at ten of twenty new messages, and yet delivers what has ended."""
    world.begin([policy])
    number = 0
    for count in range(12):
        world.put_each([f"k{number + n}" for n in range(2 * LOOK)])
        number += 2 * LOOK
        world.advance(SECOND)
        assert deliver(world, 5) or count == 0, "nothing was delivered"


def test_a_key_with_more_messages_than_a_look_waits_for_all_of_them(world: World) -> None:
    """Its newest is not known before."""
    world.begin([Debounce("1s")])
    *older, newest = world.put_many(3 * LOOK + 2, "a", ago=5 * SECOND)
    other = world.put_many(3, "b", ago=4 * SECOND)[-1]
    delivered: list[int] = []
    for _ in range(6):
        delivered += deliver(world, 5)
    assert sorted(delivered) == [newest, other]
    assert set(older) < set(world.archived())
