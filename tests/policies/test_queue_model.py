"""Delay, Concurrency, Throttle of a queue and ordered=True on real databases, against a model that
lists exactly what each claim has to lease (P1, P7, Z6, Z10, promise 7)."""

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Concurrency, Delay, Policy, Throttle
from faststream_sqlbroker.core.policies.throttle import SLOT_LEAD
from faststream_sqlbroker.core.rows import Slot
from faststream_sqlbroker.database.policies.claims import MIN_SCAN
from faststream_sqlbroker.database.policies.request import PolicyClaim
from faststream_sqlbroker.database.policies.slot_use import MIN_START_DELAY
from tests.policies.machine import UNIT, Machine, Message, check_model
from tests.policies.slots import allowed, earliest, limits

EXAMPLES = {"sqlite": 20, "postgresql": 8, "mariadb": 8, "mysql": 8}

delay = st.integers(1, 4).map(lambda n: [Delay(n * UNIT / 1e6)])
throttle = st.builds(
    lambda rate, per, burst: Throttle(rate, per=per * UNIT / 1e6, burst=burst and min(burst, rate)),
    st.integers(1, 6),
    st.integers(1, 8),
    st.none() | st.integers(1, 6),
)
concurrency = st.builds(Concurrency, st.integers(1, 3))
per_key = st.builds(Concurrency, st.integers(1, 2), per_key=st.just(True))
nothing: st.SearchStrategy[list[Policy]] = st.just([])


class QueueMachine(Machine):
    """All that does not depend on when scans ran; so each claim has one right answer."""

    policies: ClassVar = st.builds(
        lambda first, rest: [*first, *rest],
        nothing | delay,
        st.permutations([concurrency, per_key, throttle, throttle]).flatmap(
            lambda several: st.integers(0, 3).flatmap(lambda n: st.tuples(*several[:n]))
        ),
    )
    expires: ClassVar = st.sampled_from([None, None, None, UNIT, 5 * UNIT])

    def start(self) -> None:
        self.delay = next((p.delay for p in self.given if isinstance(p, Delay)), 0)
        self.throttles = [p for p in self.given if isinstance(p, Throttle)]
        self.slots: list[int] = []
        self.deadlines: list[int] = []

    def published(self, message: Message) -> None:
        message.due += self.delay

    def may_start(self, message: Message, running: Counter[str | None], taken: int) -> bool:
        """Whether it may be leased after `taken` others."""
        if message.key is None:
            return True
        if self.ordered:
            earlier = (m for m in self.live.values() if m.key == message.key and m.id < message.id)
            held = running[message.key] or any(not m.expired(self.now) for m in earlier)
            return not held
        most = next((p.limit for p in self.given if isinstance(p, Concurrency) and p.per_key), None)
        if most is not None and taken >= self.starting:
            most = 1  # what waits for a worker takes no lease of a key that others could use
        return most is None or running[message.key] < most

    def expected(self, room: int) -> list[int]:
        """The messages that a claim of up to `room` leases, in order."""
        due = [m for m in self.live.values() if m.lease is None and m.due <= self.now]
        running = Counter(m.key for m in self.leased)
        found: list[int] = []
        by_key = self.ordered or any(isinstance(p, Concurrency) and p.per_key for p in self.given)
        heads = 0
        most = MIN_SCAN if self.throttles else room
        for message in sorted(due, key=lambda m: (-m.priority, m.due, m.id)):
            only_goes = by_key and message.expired(self.now)
            if not only_goes and (heads == most or not self.may_start(message, running, heads)):
                continue
            if not only_goes:
                heads += 1
                running[message.key] += 1
            found.append(message.id)
        others = [i for i in found if not (self.throttles and self.live[i].suspect)][:room]
        return [i for i in others if not self.live[i].suspect]

    def check(self, claim: PolicyClaim, limit: int) -> None:
        room = limit
        for policy in self.given:
            if isinstance(policy, Concurrency) and not policy.per_key:
                free = policy.limit - len(self.leased)
                at_once = max(0, min(free, limit, self.starting))
                room = min(room, at_once + max(0, min(limit - at_once, (free - at_once) // 4)))
        asked = room
        if room > 0 and self.throttles:
            room = min(room, self.granted(room))
            asked = min(asked, max(room, self.starting))
        assert [row.id for row in claim.rows] == (self.expected(room) if room > 0 else [])
        for number, row in enumerate(
            r for r in claim.rows if not self.live[r.id].expired(self.now)
        ):
            self.started(row.slot, number)
        if self.throttles:
            assert allowed(limits(self.throttles), self.slots)
            next_slot = self.earliest(self.slots, self.deadlines)
            ids = {row.id for row in claim.rows}
            waiting = [
                m
                for m in self.live.values()
                if m.due <= self.now and not m.lease and m.id not in ids
            ]
            if claim.is_blocked:
                assert claim.next_claim_in is not None
                assert self.now + claim.next_claim_in * 1e6 <= max(next_slot, self.now + 1_000), (
                    "it would miss a slot"
                )
            starts = [row for row in claim.rows if not self.live[row.id].expired(self.now)]
            if room < asked and len(starts) == room and (waiting or starts):
                assert claim.is_blocked, "it would look for more where nothing can start"

    def granted(self, most: int) -> int:
        """How many slots there are before the next claim, at most so many."""
        slots, deadlines = list(self.slots), list(self.deadlines)
        while len(slots) - len(self.slots) < most:
            waits = max(0, len(slots) - len(self.slots) - self.starting + 1)
            slot = self.earliest(slots, deadlines, waits)
            if slot > self.now + SLOT_LEAD:
                break
            slots.append(slot)
            deadlines.append(slot + MIN_START_DELAY)
        return len(slots) - len(self.slots)

    def earliest(self, slots: list[int], deadlines: list[int], waits: int = 0) -> int:
        """Nothing is known of starts: each may be as late as it may. Of those that wait for a
        worker each `waits` a microsecond more.
        """
        return earliest(self.throttles, slots, self.now + waits, deadlines)

    def started(self, slot: Slot | None, number: int) -> None:
        if not self.throttles:
            assert slot is None
            return
        assert slot is not None
        at = slot.granted_at
        waits = max(0, number - self.starting + 1)
        assert at == self.earliest(self.slots, self.deadlines, waits), "not the earliest slot"
        assert at is not None
        assert slot.deadline is not None
        # The clock is known to a millisecond.
        assert 0 <= slot.deadline - at - (slot.latest - slot.earliest) * 1e6 <= 2_000
        self.slots.append(at)
        self.deadlines.append(slot.deadline)


class OrderedMachine(QueueMachine):
    """Of each key one lease at a time, by id; what is delayed, retried or postponed holds the later
    ones."""

    orders: ClassVar = st.just(True)
    policies: ClassVar = st.builds(
        lambda *parts: [policy for part in parts for policy in part],
        nothing | delay,
        nothing | st.tuples(concurrency) | st.tuples(throttle) | st.tuples(throttle, concurrency),
    )


@pytest.mark.parametrize("machine", [QueueMachine, OrderedMachine])
def test_each_claim_leases_exactly_what_it_may(
    machine: type[Machine], database: str, database_url: str
) -> None:
    """Never above a limit or a rate, never out of order; and never less than there is room for."""
    check_model(machine, database_url, examples=EXAMPLES[database])
