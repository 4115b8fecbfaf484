"""Concurrency and Once on one queue, each by a key of its own, on real databases, against a model
of the leases of tenants and the owners of orders (Z4, Z10)."""

import json
from collections import Counter
from typing import Any, ClassVar

from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Concurrency, Header, Once
from faststream_sqlbroker.database.policies.request import PolicyClaim
from tests.policies.machine import UNIT, Message, check_model
from tests.policies.test_once_model import OnceMachine

EXAMPLES = {"sqlite": 20, "postgresql": 8, "mariadb": 8, "mysql": 8}
STEPS = 50
ORDER, TENANT = Header("order"), Header("tenant")
TENANTS = ("t1", "t2", None)


def once(ttl: int, **key: Any) -> Once:
    """For so many units of time."""
    return Once(ttl * UNIT / 1e6, **key)


class TwoKeysMachine(OnceMachine):
    """The key of the publish is the order, or both keys are headers, or it is the tenant."""

    has_limits: ClassVar = True
    policies: ClassVar = st.builds(
        lambda ttl, limit, way: {
            "order": (Concurrency(limit, per_key=TENANT), once(ttl)),
            "headers": (Concurrency(limit, per_key=TENANT), once(ttl, key=ORDER)),
            "tenant": (Concurrency(limit, per_key=True), once(ttl, key=ORDER)),
        }[way],
        st.integers(4, 60),
        st.integers(1, 2),
        st.sampled_from(["order", "headers", "tenant"]),
    )

    def start(self) -> None:
        self.world.suspicion = None
        concurrency, policy = self.given
        assert isinstance(concurrency, Concurrency)
        assert isinstance(policy, Once)
        self.limit = concurrency.limit
        self.ttl = policy.ttl
        self.by_header = concurrency.per_key == TENANT, policy.key == ORDER
        self.owners = {}
        self.zombies = []
        self.claimed = {}
        self.tenants: dict[int, str | None] = {}

    def publish(self, data: st.DataObject) -> None:
        """A message of a tenant, with an order; `key` of the model is that of Once."""
        tenant = data.draw(st.sampled_from(TENANTS), "tenant")
        order = data.draw(st.sampled_from(["a", "b", None]), "order")
        priority = data.draw(st.sampled_from([0, 0, 5]), "priority")
        key = "noise" if all(self.by_header) else order if self.by_header[0] else tenant
        named = {"tenant": tenant, "order": order, "other": 1}
        stored = {name: value for name, value in named.items() if value is not None}
        for _ in range(data.draw(st.sampled_from([1, 1, 3]), "count")):
            i = self.world.put(key, priority=priority, headers=json.dumps(stored))
            self.live[i] = Message(i, order, priority, self.now, self.now)
            self.tenants[i] = tenant

    def check(self, claim: PolicyClaim, limit: int) -> None:
        """Leases of each tenant, whatever is known of orders."""
        due = [m for m in self.live.values() if m.lease is None and m.due <= self.now]
        running = Counter(self.tenants[m.id] for m in self.leased)
        expected: list[int] = []
        for message in sorted(due, key=lambda m: (-m.priority, m.due, m.id)):
            tenant = self.tenants[message.id]
            # What waits for a worker takes no lease of a tenant that others could use.
            most = self.limit if len(expected) < self.starting else 1
            if len(expected) < limit and (tenant is None or running[tenant] < most):
                running[tenant] += 1
                expected.append(message.id)
        assert [row.id for row in claim.rows] == expected
        for row in claim.rows:
            assert row.once_key == self.live[row.id].key
            assert row.policy_key == self.tenants[row.id]


def test_each_policy_has_its_key(database: str, database_url: str) -> None:
    """No tenant has more leases than its limit, and no order is started twice."""
    check_model(TwoKeysMachine, database_url, examples=EXAMPLES[database], steps=STEPS)
