"""Throttle with a slot for each message, on real databases, against a model that knows every slot
that was granted (Z10)."""

from collections import Counter, defaultdict
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.flags import ADMITTED, MAX_BACKOFFS, SLOT
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts import ordered
from faststream_sqlbroker.database.policies import claims
from faststream_sqlbroker.database.policies.intake import FULL_SCAN_INTERVAL
from faststream_sqlbroker.database.policies.request import PolicyClaim
from faststream_sqlbroker.database.policies.slot_use import MIN_START_DELAY
from faststream_sqlbroker.database.policies.slots import MAX_SLOT_WAIT
from tests.policies.machine import UNIT, Machine, Message, check_model
from tests.policies.slots import allowed, earliest, limits
from tests.policies.world import microseconds

EXAMPLES = {"sqlite": 15, "postgresql": 6, "mariadb": 6, "mysql": 6}

throttles = st.builds(
    lambda rate, per, burst, exceeded, key: Throttle(
        rate,
        per=per * UNIT / 1e6,
        burst=burst and min(burst, rate),
        key=key or exceeded == "wait",
        when_exceeded=exceeded,
    ),
    st.integers(1, 4),
    st.integers(1, 6),
    st.none() | st.integers(1, 4),
    st.sampled_from(["wait", "wait", "backoff", "drop", "dead_letter"]),
    st.booleans(),
)


class KeyedThrottleMachine(Machine):
    """Each message asks for a slot of its key when it is claimed; what becomes of it without one,
    the policy says. What waits stays as it is; what was let in once is never refused."""

    policies: ClassVar = st.tuples(throttles)
    outcomes: ClassVar = ("ack", "nack", "release", "crash", "crash")

    def start(self) -> None:
        self.policy: Throttle = self.given[0]  # type: ignore[assignment]
        self.slots: dict[str | None, list[int]] = defaultdict(list)
        self.deadlines: dict[str | None, list[int]] = defaultdict(list)
        self.slot: dict[int, int] = {}
        self.backed_off: Counter[int] = Counter()
        self.let_in: set[int] = set()
        self.promised: set[int] = set()
        """Messages that were let in, and have not been leased since."""

    def log_of(self, message: Message) -> str | None:
        """Whose slots it takes; None: it takes none."""
        return message.key if self.policy.key else ""

    def check(self, claim: PolicyClaim, limit: int) -> None:
        before = dict(self.slot)
        self.refused = list[Message]()
        self.back: list[tuple[int, int]] = []
        self.kept = list[str | None]()
        """Of each message that was let in by this claim and not leased: whose slot it is to take.
        """
        self.gone = set(self.archived())
        rows = self.world.live()
        claimed = {row.id: row for row in claim.rows}
        for message in list(self.live.values()):
            if message.id not in self.gone and message.id not in claimed:
                self.look_at(message, rows[message.id])
        for row in claim.rows:
            self.start_of(row, self.live[row.id])
        self.new_slots(before)
        self.come_back_later()
        for message_id in self.gone:
            assert self.policy.when_exceeded == "drop"
            assert not self.live[message_id].delivered, "it was let in before"
            assert message_id not in self.let_in
            self.refused.append(self.live.pop(message_id))
        for message in self.refused:
            self.nothing_was_free(message)
        self.no_message_is_forgotten(claim, limit)

    def look_at(self, message: Message, row: dict[str, Any]) -> None:
        """The effect of a claim on a message that it did not lease."""
        due = microseconds(row["next_attempt_at"])
        if row["policy_marks"] & ADMITTED:
            self.let_in.add(message.id)
        known = message.delivered or message.id in self.let_in
        if not row["policy_marks"] & SLOT:
            self.promised.discard(message.id)
        elif message.lease is None and message.id not in self.promised:
            self.promised.add(message.id)
            self.kept.append(self.log_of(message))
        if message.lease is None and due != message.due and known:
            assert self.now < due <= self.now + MAX_SLOT_WAIT, "it comes back soon"
            self.refused.append(message)
        elif message.lease is None and due != message.due:
            assert self.policy.when_exceeded == "backoff"
            self.back.append((message.id, due))
            self.refused.append(message)
        message.due = due

    def start_of(self, row: ClaimedMessage, message: Message) -> None:
        """A message is leased: in its slot, or to be made a dead letter."""
        if row.outcome is not None:
            assert self.policy.when_exceeded == "dead_letter"
            assert not message.delivered
            assert message.id not in self.let_in
            self.refused.append(message)
            return
        if row.slot is None:
            assert self.log_of(message) is None, "a message with a key takes a slot"
            message.due = microseconds(row.next_attempt_at)
            return
        slot = row.slot.granted_at
        assert slot == self.now, "each asks for a slot now"
        assert row.slot.deadline is not None
        self.slot[row.id] = row.slot.deadline
        message.due = microseconds(row.next_attempt_at)

    def new_slots(self, before: dict[int, int]) -> None:
        """Each that was granted now is allowed by what may have started before."""
        granted = defaultdict(list)
        for message_id, deadline in self.slot.items():
            if before.get(message_id) != deadline:
                granted[self.log_of(self.live[message_id])].append(deadline)
        for key, deadlines in granted.items():
            for deadline in sorted(deadlines):
                assert self.earliest(key) == self.now, "not a slot of now"
                self.slots[key].append(self.now)
                self.deadlines[key].append(deadline)
            assert allowed(limits([self.policy]), self.slots[key])

    def earliest(self, key: str | None, more: int = 0) -> int:
        """The next slot of a key, if so many `more` had one first."""
        slots, deadlines = list(self.slots[key]), list(self.deadlines[key])
        for _ in range(more):
            slots.append(earliest([self.policy], slots, self.now, deadlines))
            deadlines.append(slots[-1] + MIN_START_DELAY)
        return earliest([self.policy], slots, self.now, deadlines)

    def come_back_later(self) -> None:
        """What backs off does so for longer each time, by chance between half and one and a half
        times as long.
        """
        for message, due in self.back:
            mean = self.policy.backoff(self.backed_off[message])
            assert 0.5 * mean <= due - self.now + 1
            assert due - self.now - 1 <= 1.5 * mean
            self.backed_off[message] = min(self.backed_off[message] + 1, MAX_BACKOFFS)

    def nothing_was_free(self, message: Message) -> None:
        log = self.log_of(message)
        assert log is not None, "a message without a key takes no slot"
        assert self.earliest(log, self.kept.count(log)) > self.now, "there was a slot for it"

    def no_message_is_forgotten(self, claim: PolicyClaim, limit: int) -> None:
        """With room left, each message with a slot now is leased; all others have asked for one."""
        if len(claim.rows) == limit:
            return
        ids = {row.id for row in claim.rows}
        for message in self.live.values():
            # What has come back with its old due time may be seen by the next look at everything
            # only.
            seen = self.now >= message.returned + FULL_SCAN_INTERVAL * 1e6 and not message.suspect
            if message.lease is None and message.id not in ids and seen:
                assert (
                    message.due > self.now
                    or claim.has_more
                    or claim.next_claim_in == 0
                    or self.waits_for_its_key(message)
                ), "it waits without a slot"

    def waits_for_its_key(self, message: Message) -> bool:
        """Whether nothing is known of a slot for it: its key has none now."""
        log = self.log_of(message)
        return (
            self.policy.when_exceeded == "wait"
            and log is not None
            and self.earliest(log) > self.now
        )

    def ended(self, message: Message, how: str) -> None:
        # Its slot is gone, so the next attempt must show another: if it were the same, it would not
        # be the earliest.
        self.slot.pop(message.id, None)
        self.promised.discard(message.id)
        if how in {"ack", "reject"}:
            self.seen.add(message.id)


@pytest.mark.parametrize("looked_at", [100, 1])
def test_each_slot_is_the_earliest_and_starts_one_attempt(
    database: str, database_url: str, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than the rate of a key in any period, lost slots are not given again, nothing
    waits for no reason; also where a claim looks at one message, and finds the others by their
    keys."""
    monkeypatch.setattr(ordered, "MIN_WINDOW", looked_at)
    monkeypatch.setattr(claims, "MIN_SCAN", looked_at)
    check_model(KeyedThrottleMachine, database_url, examples=EXAMPLES[database])
