"""Cancels race with claims, settles, retries, late flushes, and leases that run out: on real
databases, against a model of who has each message, and what is asked of whom."""

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from faststream_sqlbroker.core.outcome import Ack, Defer, Nack, Outcome, Reject, Release
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from tests.policies.machine import UNIT, check_model
from tests.policies.world import QUEUE, World

pytestmark = pytest.mark.capability("`broker.admin.cancel` of a running message")
EXAMPLES = {"sqlite": 25, "postgresql": 12, "mariadb": 8, "mysql": 8}
STEPS = 50
LEASE = 4 * UNIT
RULES = SettleRules(retry_strategy=ConstantRetryStrategy(delay_seconds=0))
OUTCOMES: dict[str, Outcome] = {
    "ack": Ack(),
    "retry": Nack(delay=0.0),
    "reject": Reject(),
    "postpone": Defer(0.0),
    "release": Release(),
}
ENDS = {"ack": "COMPLETED", "reject": "FAILED"}
BY = "cancelled by Ann"
KINDS = (
    *["claim"] * 3,
    *["cancel"] * 3,
    *["settle"] * 4,
    *["wait"] * 2,
    *["release"] * 2,
    "publish",
    "flush_late",
    "renew",
    "clean",
)


@dataclass
class Lease:
    """One delivery, as its holder knows it; the holder may be late, or dead."""

    row: ClaimedMessage
    until: int
    asked: bool = False


@dataclass
class Message:
    """What must be true of a message."""

    lease: Lease | None = None
    ended: str | None = None
    """The state in the archive."""
    stale: list[Lease] = field(default_factory=list)
    """Deliveries that have lost their leases; their holders may not know."""


class CancelMachine(RuleBasedStateMachine):
    """Holders that hear of requests late or never, operators, and what releases leases."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.messages: dict[int, Message] = {}

    @initialize()
    def begin(self) -> None:
        self.world.begin(())
        for _ in range(3):
            self.publish()

    @property
    def leased(self) -> list[int]:
        return sorted(i for i, m in self.messages.items() if m.lease is not None)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One rule for all, so that examples are not built of a few kinds of steps only."""
        kind = data.draw(st.sampled_from(KINDS), "kind")
        if kind in {"settle", "renew"} and not self.leased:
            kind = "claim"
        if kind == "flush_late" and not any(m.stale for m in self.messages.values()):
            kind = "cancel"
        getattr(self, kind)(data)

    def choose(self, data: st.DataObject, among: list[int]) -> Message:
        self.chosen = data.draw(st.sampled_from(among), "message")
        return self.messages[self.chosen]

    def run(self, work: Any) -> Any:
        return self.world.run(work)

    def over(self, lease: Lease) -> bool:
        return lease.until < self.world.now

    def publish(self, _data: st.DataObject | None = None) -> None:
        self.messages[self.world.put(None)] = Message()

    def wait(self, data: st.DataObject) -> None:
        self.world.advance(data.draw(st.integers(1, 3), "length") * UNIT)

    def claim(self, data: st.DataObject) -> None:
        limit = data.draw(st.integers(1, 2), "limit")
        store = self.world.store
        pairs = [p for p in self.run(store.find_ready_pairs([QUEUE])) if p.due_in <= 0]
        for row in self.run(store.claim(pairs, limit, LEASE / 1e6, uuid4())):
            message = self.messages[row.id]
            assert message.lease is None
            assert message.ended is None
            message.lease = Lease(row, self.world.now + LEASE)

    def cancel(self, data: st.DataObject) -> None:
        of_leased = bool(self.leased) and data.draw(st.booleans(), "of leased")
        message = self.choose(data, self.leased if of_leased else sorted(self.messages))
        found = self.run(self.world.store.repairs.cancel(self.chosen, BY))
        if message.ended is not None:
            assert found.verdict == "ended"
        elif message.lease is None or self.over(message.lease):
            assert found.verdict == "done"
            self.lose(message)
            message.ended = "DISCARDED"
        else:
            assert found.verdict == "requested"
            message.lease.asked = True

    def settle(self, data: st.DataObject) -> None:
        """The holder writes an outcome, which a request that it has heard of may have changed."""
        how, hears = self.draw_outcome(data)
        message = self.choose(data, self.leased)
        lease = message.lease
        assert lease is not None
        orders = self.run(
            self.world.store.live_subscribers.write_heartbeat({}, set(), 60.0, clean=False)
        )
        told = {(r.message_id, r.lease_token) for r in orders.cancels}
        mark = (lease.row.id, lease.row.lease_token)
        assert (mark in told) == lease.asked
        lease.row.cancelled = BY if hears and mark in told else None
        self.write(lease.row, how)
        if how in ENDS:
            message.ended = ENDS[how]
        elif lease.row.cancelled is not None:
            message.ended = "DISCARDED"
        message.stale.append(lease)
        message.lease = None

    def write(self, row: ClaimedMessage, how: str, *, held: bool = True) -> None:
        written = settle(row, OUTCOMES[how], RULES, ended_after=0.0, attempted=how != "release")
        result = self.run(self.world.store.settle([written]))
        assert (result.settled_ids if held else result.lost_ids) == {row.id}

    def draw_outcome(self, data: st.DataObject) -> tuple[str, bool]:
        """What its handler says, and whether the request was heard of."""
        how = data.draw(st.sampled_from(sorted(OUTCOMES)), "outcome")
        return how, data.draw(st.booleans(), "hears")

    def flush_late(self, data: st.DataObject) -> None:
        """A holder that has lost its lease changes nothing, cancelled or not."""
        how, hears = self.draw_outcome(data)
        message = self.choose(data, sorted(i for i, m in self.messages.items() if m.stale))
        row = data.draw(st.sampled_from(message.stale), "lease").row
        row.cancelled = BY if hears else None
        self.write(row, how, held=False)

    def renew(self, data: st.DataObject) -> None:
        message = self.choose(data, self.leased)
        lease = message.lease
        assert lease is not None
        mark = (lease.row.id, lease.row.lease_token)
        assert self.run(self.world.store.renew([mark], LEASE / 1e6)) == {self.chosen}
        lease.until = max(lease.until, self.world.now + LEASE)

    def release(self, _data: st.DataObject) -> None:
        """As the loop that releases does: what was to be cancelled first."""
        over = [m for m in self.messages.values() if m.lease is not None and self.over(m.lease)]
        asked = [m for m in over if m.lease is not None and m.lease.asked]
        assert self.run(self.world.store.end_cancelled([QUEUE], archive=True)) == len(asked)
        released = self.run(self.world.store.release_stuck([QUEUE], 100))
        assert released == len(over) - len(asked)
        for message in asked:
            message.ended = "DISCARDED"
        for message in over:
            self.lose(message)

    def lose(self, message: Message) -> None:
        if message.lease is not None:
            message.stale.append(message.lease)
            message.lease = None

    def clean(self, _data: st.DataObject) -> None:
        """Requests of leases that are held stay."""
        live = self.world.store.live_subscribers
        self.run(live.write_heartbeat({}, set(), 60.0, clean=True))
        orders = self.run(live.write_heartbeat({}, set(), 60.0, clean=False))
        held = {
            (i, m.lease.row.lease_token)
            for i, m in self.messages.items()
            if m.lease is not None and m.lease.asked
        }
        assert {(r.message_id, r.lease_token) for r in orders.cancels} == held

    @invariant()
    def each_message_is_in_one_place(self) -> None:
        live = self.world.live()
        archived = self.world.archived()
        ended = {i: m.ended for i, m in self.messages.items() if m.ended is not None}
        assert {i: row["state"] for i, row in archived.items()} == ended
        assert set(live) == self.messages.keys() - ended.keys()
        for i, row in live.items():
            lease = self.messages[i].lease
            assert row["lease_token"] == (None if lease is None else lease.row.lease_token)
            assert (row["state"] == "PROCESSING") == (lease is not None)
        for row in archived.values():
            if row["state"] == "DISCARDED":
                assert row["reason"] == "cancelled"
                assert row["last_error"].startswith(BY)


def test_a_cancel_neither_loses_nor_doubles_a_message(database: str, database_url: str) -> None:
    check_model(CancelMachine, database_url, examples=EXAMPLES[database], steps=STEPS)  # type: ignore[arg-type]
