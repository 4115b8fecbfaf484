"""Rules that every model of a policy shares: publish, let time pass, claim by one of three
processes, end a delivery."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.suspects import SUSPECT_AFTER
from faststream_sqlbroker.database.policies.request import PolicyClaim
from tests.policies.world import PROCESSES, World, microseconds, outcome

UNIT = 500_000
"""Times are few, so that they meet; so long that looks which begin where the last one ended are
tried, too."""
LONGER = int(os.environ.get("SQLBROKER_MODELS", "1"))
"""So many times as many examples as usual, and longer ones."""

keys = st.sampled_from(["a", "b", None])
delays = st.sampled_from([0, 0, 0, 1, 2, 3, 7]).map(lambda n: n * UNIT)


@dataclass
class Message:
    """A live message in a model; times are microseconds since 1970."""

    id: int
    key: str | None
    priority: int
    created: int
    due: int
    expires: int | None = None
    lease: ClaimedMessage | None = field(default=None, repr=False)
    acquired: int = 0
    delivered: bool = False
    lost: int = 0
    """Leases."""
    returned: int = 0
    """When it has come back with its old due time."""

    @property
    def suspect(self) -> bool:
        """Whether it may be what has killed its process: it is claimed by itself only."""
        return self.lost >= SUSPECT_AFTER

    def expired(self, now: int) -> bool:
        """Whether it is not to be handled any more."""
        return self.expires is not None and self.expires <= now


class Machine(RuleBasedStateMachine):
    """A queue under policies; a model of them says after each claim what had to come."""

    kinds: ClassVar[Sequence[str]] = (
        "publish",
        "wait",
        "settle",
        "wait",
        "settle",
        "claim",
        "publish",
    )
    policies: ClassVar[st.SearchStrategy[Sequence[Policy]]]
    orders: ClassVar[st.SearchStrategy[bool]] = st.just(False)
    outcomes: ClassVar[Sequence[str]] = (
        "ack",
        "ack",
        "nack",
        "reject",
        "postpone",
        "release",
        "crash",
    )
    expires: ClassVar[st.SearchStrategy[int | None]] = st.none()
    late: ClassVar[st.SearchStrategy[int]] = st.just(0)
    ahead: ClassVar[st.SearchStrategy[int]] = st.just(0)
    """How far the clock of a producer is ahead of the database's."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.live: dict[int, Message] = {}
        self.seen: set[int] = set()
        self.checking = False
        self.starting = 0
        """Free workers of the process that claims."""

    @property
    def now(self) -> int:
        return self.world.now

    @property
    def leased(self) -> list[Message]:
        return [m for m in self.live.values() if m.lease is not None]

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        policies = data.draw(self.policies, "policies")
        ordered = data.draw(self.orders, "ordered")
        self.world.begin(policies, ordered=ordered)
        self.given = policies
        self.ordered = ordered
        self.start()

    def start(self) -> None:
        """The policies are known."""

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One rule, of which Hypothesis cannot leave out parts: without claims and time little
        happens."""
        kind = data.draw(st.sampled_from(self.kinds), "kind")
        getattr(self, kind)(data)

    def publish(self, data: st.DataObject) -> None:
        """One message, or several of a key."""
        key = data.draw(keys, "key")
        delay = data.draw(delays, "delay")
        priority = data.draw(st.sampled_from([0, 0, 0, 5, -5]), "priority")
        count = data.draw(st.sampled_from([1, 1, 3]), "count")
        expires = data.draw(self.expires, "expires")
        ago = data.draw(self.late, "ago")
        ahead = data.draw(self.ahead, "ahead")
        for _ in range(count):
            fields: dict[str, Any] = {"expires_in": expires / 1e6} if expires else {}
            message = self.world.put(
                key, delay=delay, ago=ago, ahead=ahead, priority=priority, **fields
            )
            written = self.now - ago
            gone = None if not expires else self.now + expires
            self.live[message] = Message(
                message, key, priority, written + ahead, written + delay, gone
            )
            self.published(self.live[message])

    def published(self, message: Message) -> None:
        """There is a new one."""

    def wait(self, data: st.DataObject) -> None:
        """Time passes; then a worker claims."""
        units = data.draw(st.sampled_from([1, 1, 2, 3, 5, 11]), "units")
        self.world.advance(units * UNIT - data.draw(st.sampled_from([0, 0, 1_000]), "less"))
        self.claim(data)

    def claim(self, data: st.DataObject) -> None:
        """By one of the processes."""
        process = data.draw(st.integers(0, PROCESSES - 1), "process")
        limit = data.draw(st.sampled_from([1, 2, 5, 20]), "limit")
        self.starting = data.draw(st.sampled_from([limit, limit, limit // 2, 0]), "starting")
        self.claim_by(process, limit)

    def claim_by(self, process: int, limit: int) -> None:
        """Claim, and compare."""
        self.checking = True
        self.starting = min(self.starting, limit)
        claim = self.world.claim(process, limit, self.starting)
        ids = [row.id for row in claim.rows]
        assert len(ids) == len(set(ids)) <= limit
        for row in claim.rows:
            message = self.live[row.id]
            assert message.lease is None, "two leases of a message"
            assert message.due <= microseconds(row.acquired_at) == self.now
        self.check(claim, limit)
        for row in claim.rows:
            message = self.live[row.id]
            message.lease = row
            message.acquired = self.now
            message.delivered = True
        self.checking = False

    def check(self, claim: PolicyClaim, limit: int) -> None:
        """Compare with the model; the leases are noted afterwards."""
        raise NotImplementedError

    def settle(self, data: st.DataObject) -> None:
        """One of the deliveries ends, if there is any."""
        if not self.leased:
            return
        message = data.draw(st.sampled_from(self.leased), "message")
        delay = data.draw(st.sampled_from([0, 0, 1, 4]), "units") * UNIT
        assert message.lease is not None
        how = data.draw(st.sampled_from(self.outcomes), "how")
        if message.lease.outcome is not None:
            how = "reject"
        elif message.expired(message.acquired):
            how = "expired"  # a worker does not start it
        self.end(message, how, delay)

    def end(self, message: Message, how: str, delay: int = 0) -> None:
        """A delivery ends."""
        assert message.lease is not None
        if how == "crash":
            self.world.crash(message.lease)
        else:
            self.world.settle(message.lease, outcome(how, delay))
        message.lease = None
        message.lost += how == "crash"
        if how in {"crash", "release"}:
            message.returned = self.now
        if how in {"nack", "postpone"}:
            message.due = self.now + delay
        if how in {"ack", "reject", "expired"}:
            del self.live[message.id]
        self.ended(message, how)

    def ended(self, message: Message, how: str) -> None:
        """Its lease is over."""

    def archived(self) -> dict[int, dict[str, Any]]:
        """The messages that have left the queue since the last call."""
        rows = self.world.archived()
        found = {i: row for i, row in rows.items() if i not in self.seen}
        self.seen |= set(found)
        return found


def check_model(
    machine: type[Machine],
    url: str,
    *,
    examples: int,
    steps: int = 30,
    world: type[World] = World,
) -> None:
    """Run `machine` on the database at `url`."""
    with world(url) as real:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: machine(real),
            settings=settings(
                max_examples=examples * LONGER,
                stateful_step_count=steps if LONGER == 1 else 2 * steps,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                derandomize=LONGER == 1,
                suppress_health_check=list(HealthCheck),
            ),
        )
