"""Debounce on real databases, against a model of its definition: what is delivered, when, what is
superseded (Z7)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Debounce, Delay, Policy
from faststream_sqlbroker.core.policies.standby import find_target
from faststream_sqlbroker.database.policies.key_heads import (
    MAX_BURST_RECHECK,
    MIN_BURST_RECHECK,
)
from faststream_sqlbroker.database.policies.request import PolicyClaim
from tests.policies.bursts import Burst
from tests.policies.clock import MICROSECONDS
from tests.policies.machine import UNIT, Machine, Message, check_model

YEAR = 365 * 86_400 * MICROSECONDS
EXAMPLES = {"sqlite": 20, "postgresql": 8, "mariadb": 8, "mysql": 8}

trailing = st.builds(
    lambda window, more: Debounce(
        window * UNIT / 1e6, max_wait=None if more is None else (window + more) * UNIT / 1e6
    ),
    st.integers(1, 4),
    st.sampled_from([None, 0, 1, 5]),
)
leading = st.integers(1, 4).map(lambda window: Debounce(window * UNIT / 1e6, edge="leading"))
delay = st.integers(1, 3).map(lambda n: Delay(n * UNIT / 1e6))


class Key:
    """The bursts of one key: those whose message is to come, and the message that was delivered
    last."""

    def __init__(self) -> None:
        self.bursts: list[Burst] = []
        self.current: int | None = None
        self.standing = set[int]()
        """What is superseded when the message starts that is delivered in its place."""
        self.busy_since = self.settled_at = 0
        """From when to when one message after the other has kept the next one waiting."""


class DebounceMachine(Machine):
    """Each claim: all that has come takes part, in the order of arrival; then ended bursts are
    delivered in theirs."""

    policies: ClassVar[st.SearchStrategy[Sequence[Policy]]] = st.one_of(
        st.tuples(trailing), st.tuples(leading), st.tuples(delay, trailing | leading)
    )
    late: ClassVar = st.sampled_from([0, 0, 0, 0, UNIT, 3 * UNIT])
    ahead: ClassVar = st.sampled_from([0, 0, 0, 0, UNIT, YEAR])

    def start(self) -> None:
        self.policy = next(p for p in self.given if isinstance(p, Debounce))
        self.delay = sum(p.delay for p in self.given if isinstance(p, Delay))
        self.of: dict[str, Key] = defaultdict(Key)
        self.unseen: list[Message] = []
        self.reasons: dict[int, int] = {}

    def published(self, message: Message) -> None:
        message.due += self.delay
        self.unseen.append(message)

    def take_part(self) -> None:
        """All that has come by now, in the order of arrival."""
        come = [m for m in self.unseen if m.due <= self.now]
        self.unseen = [m for m in self.unseen if m.due > self.now]
        for message in sorted(come, key=lambda m: (self.arrival(m), m.id)):
            if message.key is None:
                continue
            self.arrive(message, self.of[message.key])
        for key in self.of.values():
            for burst in key.bursts:
                gone = burst.gone & set(self.live)
                if burst.delivered:
                    self.supersede(gone - key.standing, burst.chosen)
                else:
                    key.standing |= gone

    def supersede(self, gone: set[int], by: int) -> None:
        for message in gone:
            self.reasons[message] = by
            del self.live[message]

    def arrival(self, message: Message) -> int:
        """When it came; it takes part now, so a later time is wrong."""
        return max(message.due, min(message.created, self.now))

    def arrive(self, message: Message, key: Key) -> None:
        at = self.arrival(message)
        closed = [
            burst for burst in key.bursts[-2:] if burst is not key.bursts[-1] or not burst.open
        ]
        if closed and closed[-1].takes_late((at, message.id)):
            closed[-1].late.add(message.id)
            return
        if not key.bursts or not key.bursts[-1].open or at > key.bursts[-1].end:
            key.bursts.append(Burst(self.policy))
        burst = key.bursts[-1]
        burst.arrivals.append((at, message.id))

    def turn(self, key: Key) -> Burst | None:
        """The first burst of the key whose message was not delivered and has not gone otherwise."""
        return next((b for b in key.bursts if not b.delivered and b.chosen in self.live), None)

    def check(self, claim: PolicyClaim, limit: int) -> None:
        self.take_part()
        for row in claim.rows:
            self.deliver(self.live[row.id])
        archived = self.archived()
        found = {i: row["related_id"] for i, row in archived.items()}
        assert found == self.reasons, "others are superseded"
        assert all(row["state"] == "DISCARDED" for row in archived.values())
        assert all(row["reason"] == "superseded" for row in archived.values())
        self.reasons.clear()
        if len(claim.rows) < limit:
            self.no_message_is_late({row.id for row in claim.rows})

    def deliver(self, message: Message) -> None:
        if message.key is None:
            return
        key = self.of[message.key]
        if key.current in self.live:
            assert key.current == message.id, "the message before has not settled"
        else:
            burst = self.turn(key)
            assert burst is not None
            assert message.id == burst.chosen
            assert burst.due <= self.now
            self.supersede(self.replaced_by(key, message.id), message.id)
            burst.delivered = True
            burst.open = burst.open and self.policy.edge == "leading"
            if burst.due > key.settled_at:
                key.busy_since = self.now
            key.current = message.id

    def replaced_by(self, key: Key, message: int) -> set[int]:
        """Which of those that stand by have stood by for it."""
        waiting = [b.chosen for b in key.bursts if not b.delivered and b.chosen in self.live]
        leading = self.policy.edge == "leading"
        gone = {i for i in key.standing if find_target(waiting, i, leading=leading) == message} | (
            {i for i in key.standing if i < message} if not leading else set()
        )
        key.standing -= gone
        return gone

    def no_message_is_late(self, claimed: set[int]) -> None:
        """A message that waits for the one before it does so at most twice as long as it must."""
        for message in self.live.values():
            if message.key is None and message.lease is None and message.id not in claimed:
                assert message.due > self.now
        for key in self.of.values():
            if key.current in self.live:
                current = self.live[key.current]
                assert current.lease or current.id in claimed or current.due > self.now, (
                    "it is tried again"
                )
            elif (burst := self.turn(key)) is not None:
                pause = min(
                    max(MIN_BURST_RECHECK, key.settled_at - key.busy_since),
                    MAX_BURST_RECHECK,
                )
                assert self.now < max(burst.due, key.settled_at + pause), "it waits too long"

    def ended(self, message: Message, how: str) -> None:
        if how in {"ack", "reject", "expired"}:
            self.seen.add(message.id)
            if message.key is not None:
                self.of[message.key].settled_at = self.now

    def teardown(self) -> None:
        """In the end every published message is delivered or superseded, and none twice."""
        if self.checking or not hasattr(self, "policy"):
            return
        for _ in range(60):
            if not self.live:
                break
            for message in self.leased:
                self.end(message, "expired" if message.expired(message.acquired) else "ack")
            self.world.advance(3 * UNIT)
            self.claim_by(0, 20)
        assert not self.live


def test_each_burst_delivers_its_one_message(database: str, database_url: str) -> None:
    """While deliveries fail, wait, crash and come back, and commits are late."""
    check_model(DebounceMachine, database_url, examples=EXAMPLES[database])
