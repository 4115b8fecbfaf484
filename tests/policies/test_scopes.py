"""One budget over several queues, with the database's clock in the test's hands: what a plain model
of its definition says, on every database.
"""

from collections.abc import Iterator
from random import Random
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.policies import Concurrency, Policy, Throttle
from faststream_sqlbroker.core.policies.scopes import MEMBER_LIFETIME
from faststream_sqlbroker.core.policies.throttle import OTHER_LIMITS_LIFETIME, SLOT_LEAD
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest
from faststream_sqlbroker.database.policies.slot_use import MIN_START_DELAY
from tests.policies.clock import MICROSECONDS
from tests.policies.world import LEASE, World

pytestmark = pytest.mark.capability("one budget over several queues: `scope=` of policies")

QUEUES = ["a", "b", "c"]
STEPS = 60


class Shop(World):
    """Three queues, each with a subscriber of its own, and one that takes from two."""

    def start(self) -> None:
        """Empty tables."""
        self.begin([])
        self.known = [self.new_memory() for _ in range(4)]

    def publish(self, queue: str, count: int) -> None:
        """Due at once."""
        self.run(self.store.insert([NewMessage(queue, b"1") for _ in range(count)]))

    def take(self, who: int, queues: list[str], policy: Policy, limit: int) -> list[ClaimedMessage]:
        """One claim."""
        wanted = PolicyClaimRequest(queues, limit, LEASE, uuid4(), [policy])
        claim, self.known[who] = self.run(self.store.policies.claim(wanted, self.known[who]))
        return claim.rows


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    with Shop(database_url) as shop:
        shop.start()
        yield shop


@pytest.mark.parametrize("seed", range(3))
def test_slots_are_those_of_one_throttle(shop: Shop, seed: int) -> None:
    """Whichever queue asks: at most the lowest live rate, and no slot is left unused."""
    chance = Random(seed)
    rules = [
        Throttle(chance.randint(1, 9), f"{chance.randint(1, 4)}s", scope="mail") for _ in range(4)
    ]
    granted: list[int] = []
    last_slot: dict[int, int] = {}
    waiting = dict.fromkeys(QUEUES, 0)
    for _ in range(STEPS):
        what = chance.random()
        if what < 0.3:
            queue = chance.choice(QUEUES)
            count = chance.randint(1, 12)
            shop.publish(queue, count)
            waiting[queue] += count
        elif what < 0.6:
            shop.advance(chance.choice([1_000, 90_000, 400_000, 1_300_000, MEMBER_LIFETIME]))
        else:
            who = chance.randrange(4)
            queues = QUEUES[:2] if who == 3 else [QUEUES[who]]
            limit = chance.randint(1, 8)
            due = min(limit, sum(waiting[queue] for queue in queues))
            if not due:
                continue
            live = [
                rule
                for n, rule in enumerate(rules)
                if n == who or last_slot.get(n, 0) + OTHER_LIMITS_LIFETIME >= shop.now
            ]
            expected = model(live, granted, shop.now, due)
            rows = shop.take(who, queues, rules[who], limit)
            slots = sorted(row.slot.granted_at for row in rows if row.slot and row.slot.granted_at)
            assert slots == expected, (who, [str(rule) for rule in live])
            granted += expected
            if expected:
                last_slot[who] = expected[-1]
            for row in rows:
                waiting[row.queue] -= 1
                shop.settle(row, Ack())
    assert granted


def model(rules: list[Throttle], granted: list[int], now: int, most: int) -> list[int]:
    """The slots that all of `rules` grant after those `granted`.

    Each start counts as late as it may have been: no process reports one here.
    """
    starts = sorted(slot + MIN_START_DELAY for slot in granted)
    found: list[int] = []
    while len(found) < most:
        at = now
        for rule in rules:
            if len(starts) >= rule.rate:
                at = max(at, starts[-rule.rate] + rule.per + 1)
        if at > now + SLOT_LEAD:
            break
        starts = sorted([*starts, at + MIN_START_DELAY])
        found.append(at)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_leases_are_counted_together(shop: Shop, seed: int) -> None:
    """Whichever queue asks: never more than the lowest live limit, and as many as it allows."""
    chance = Random(seed)
    limits = [Concurrency(chance.randint(2, 6), scope="mail") for _ in range(4)]
    held: list[ClaimedMessage] = []
    claimed_at: dict[int, int] = {}
    waiting = dict.fromkeys(QUEUES, 0)
    for _ in range(STEPS):
        what = chance.random()
        if what < 0.25:
            queue = chance.choice(QUEUES)
            shop.publish(queue, 5)
            waiting[queue] += 5
        elif what < 0.4:
            shop.advance(chance.choice([1_000, 5 * MICROSECONDS, MEMBER_LIFETIME]))
        elif what < 0.6 and held:
            shop.settle(held.pop(chance.randrange(len(held))), Ack())
        else:
            who = chance.randrange(4)
            queues = QUEUES[:2] if who == 3 else [QUEUES[who]]
            limit = chance.randint(1, 8)
            due = min(limit, sum(waiting[queue] for queue in queues))
            if not due:
                continue
            claimed_at[who] = shop.now
            live = [
                limits[n].limit for n, at in claimed_at.items() if shop.now - at < MEMBER_LIFETIME
            ]
            rows = shop.take(who, queues, limits[who], limit)
            assert len(rows) == min(due, max(0, min(live) - len(held)))
            held += rows
            for row in rows:
                waiting[row.queue] -= 1


def test_a_budget_is_its_name(shop: Shop) -> None:
    """Other scopes, and queues without one, are not counted."""
    for queue in QUEUES:
        shop.publish(queue, 5)
    assert len(shop.take(0, ["a"], Throttle(2, "1h", scope="mail"), 9)) == 2
    assert shop.take(1, ["b"], Throttle(2, "1h", scope="mail"), 9) == []
    assert len(shop.take(1, ["b"], Throttle(2, "1h", scope="else"), 9)) == 2
    assert len(shop.take(2, ["c"], Throttle(2, "1h"), 9)) == 2


def test_a_crashed_process_gives_its_leases_back(shop: Shop) -> None:
    """There is no counter that a crash could leave too high."""
    for queue in QUEUES:
        shop.publish(queue, 5)
    policy = Concurrency(2, scope="mail")
    held = shop.take(0, ["a"], policy, 9)
    assert len(held) == 2
    assert shop.take(1, ["b"], policy, 9) == []
    for row in held:
        shop.run(shop._expire(row.id))
    assert shop.run(shop.store.release_stuck(["a"], 100)) == 2
    assert len(shop.take(1, ["b"], policy, 9)) == 2
