"""Once on real databases, against a model of who has a key: never two starts, and what is not known
is listed (Z4)."""

from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts.once import RETENTION, OnceStatus
from faststream_sqlbroker.database.policies.request import PolicyClaim
from tests.policies.machine import UNIT, Machine, Message, check_model
from tests.policies.world import QUEUE

EXAMPLES = {"sqlite": 20, "postgresql": 8, "mariadb": 8, "mysql": 8}
STEPS = 50


@dataclass
class Owner:
    """The delivery that has claimed a key."""

    message: int
    delivery: tuple[UUID, int] | None
    """None: its end is unknown, and it cannot be given back."""
    until: int
    unknown: bool = False


class OnceMachine(Machine):
    """Workers claim keys before they start handlers: some at a time, some twice, some after they
    have lost the lease."""

    kinds: ClassVar = (
        "publish",
        "wait",
        "claim",
        "settle",
        "settle",
        "settle",
        "start_handlers",
        "start_handlers",
        "start_handlers",
        "start_handlers",
        "give_back_late",
        "operator_looks",
        "maintain",
    )
    policies: ClassVar = st.integers(4, 60).map(lambda n: (Once(n * UNIT / 1e6),))
    has_limits: ClassVar = False
    """Whether another policy stores its limits, which expire, too."""
    outcomes: ClassVar = ("crash", "crash", "release", "retry", "ack", "reject")

    def start(self) -> None:
        self.world.suspicion = None  # which messages run alone is another model's matter
        self.ttl: int = self.given[0].ttl  # type: ignore[union-attr]
        self.owners: dict[str, Owner] = {}
        self.zombies: list[ClaimedMessage] = []
        self.claimed: dict[tuple[UUID, int], ClaimedMessage] = {}

    def check(self, claim: PolicyClaim, limit: int) -> None:
        due = [m for m in self.live.values() if m.lease is None and m.due <= self.now]
        expected = sorted(due, key=lambda m: (-m.priority, m.due, m.id))[:limit]
        assert [row.id for row in claim.rows] == [m.id for m in expected]

    def start_handlers(self, data: st.DataObject) -> None:
        """Of some that are leased, or were."""
        held = [m.lease for m in self.leased if m.key is not None and m.lease is not None]
        if not held and not self.zombies:
            return
        rows = data.draw(
            st.lists(st.sampled_from([*held, *self.zombies]), min_size=1, max_size=3, unique_by=id)
        )
        rows = list({row.id: row for row in rows}.values())
        verdicts = self.world.run(self.world.store.policies.claim_keys(rows, self.ttl / 1e6))
        assert set(verdicts) == {row.id for row in rows}
        for row in sorted(rows, key=lambda r: (r.once_key or "", r.id)):
            owner = self.owners.get(row.once_key or "")
            before = owner and owner.delivery
            assert verdicts[row.id] == self.expected(row), row.id
            if (
                verdicts[row.id][0] is OnceStatus.UNKNOWN
                and before
                and data.draw(st.booleans(), "late")
            ):
                self.give_back(self.claimed[before])
                self.listed()

    def expected(self, row: ClaimedMessage) -> tuple[OnceStatus, int | None]:
        """The planned end of a delivery whose handler is about to start."""
        message = self.live.get(row.id)
        if message is None or message.lease is not row:
            return OnceStatus.LOST, None
        assert row.once_key is not None
        owner = self.owners.get(row.once_key)
        delivery = (row.lease_token, row.id)
        if owner is not None and owner.delivery == delivery:
            return OnceStatus.START, row.id
        over = owner is None or owner.until <= self.now
        again = row.deliveries_count > 1
        if owner is not None and owner.message == row.id and (not over or again):
            owner.unknown = True
            owner.delivery = None
            return OnceStatus.UNKNOWN, row.id
        if owner is not None and not over:
            return OnceStatus.DUPLICATE, owner.message
        self.owners[row.once_key] = Owner(row.id, delivery, self.now + self.ttl)
        self.claimed[delivery] = row
        return OnceStatus.START, row.id

    def end(self, message: Message, how: str, delay: int = 0) -> None:
        row = message.lease
        assert row is not None
        if how == "retry":
            self.give_back(row)
            how = "nack"
        if how == "crash":
            self.zombies.append(row)
        super().end(message, how, delay)

    def give_back(self, row: ClaimedMessage) -> None:
        """RetryPossible: the key is given back, if it was this delivery that had claimed it."""
        self.world.run(self.world.store.policies.release_keys([row] if row.once_key else []))
        owner = self.owners.get(row.once_key or "")
        if row.once_key and owner is not None and owner.delivery == (row.lease_token, row.id):
            del self.owners[row.once_key]

    def give_back_late(self, data: st.DataObject) -> None:
        """By a worker that may have lost the lease, and had claimed the key."""
        if self.claimed:
            self.give_back(self.claimed[data.draw(st.sampled_from(list(self.claimed)))])

    def listed(self) -> dict[int, str]:
        """The list of unknown outcomes is what the model says."""
        expected = {o.message: key for key, o in self.owners.items() if o.unknown}
        found: Any = self.world.run(self.world.store.ack_first_starts.list_unknown(QUEUE, 100))
        assert {(u.message_id, u.key) for u in found} == set(expected.items())
        return expected

    def operator_looks(self, data: st.DataObject) -> None:
        """A key that is removed from the list stays claimed."""
        expected = self.listed()
        forgotten = data.draw(st.sets(st.sampled_from(sorted(expected)))) if expected else set()
        assert self.world.run(self.world.store.ack_first_starts.forget(sorted(forgotten))) == len(
            forgotten
        )
        for message in forgotten:
            self.owners[expected[message]].unknown = False

    def maintain(self, data: st.DataObject) -> None:
        """Only keys that have expired are forgotten."""
        if data.draw(st.sampled_from([False, False, False, True]), "much later"):
            self.world.advance(round(RETENTION * 1e6))
        over = [
            key for key, owner in self.owners.items() if owner.until + RETENTION * 1e6 <= self.now
        ]
        removed = self.world.run(self.world.store.remove_expired_states(100))
        assert removed >= len(over) if self.has_limits else removed == len(over)
        for key in over:
            del self.owners[key]


def test_a_key_is_started_once(database: str, database_url: str) -> None:
    """Never twice within its time unless it was given back; a crash never gives it back, and is
    listed."""
    check_model(OnceMachine, database_url, examples=EXAMPLES[database], steps=STEPS)
