"""The slots of Throttle at a claim: how many messages may start, and when.

Times are microseconds since 1970.
"""

from collections.abc import Mapping, Sequence

from faststream_sqlbroker.core.policies import Policy, Throttle
from faststream_sqlbroker.core.policies.live_rates import LiveRates
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.throttle import (
    AHEAD,
    SLOT_SHARE,
    first_slot,
    next_slots,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, Slot
from faststream_sqlbroker.policies.gates import States, gate_of
from faststream_sqlbroker.policies.intake import Intake, slot_scope
from faststream_sqlbroker.policies.key_slots import KeySlots
from faststream_sqlbroker.policies.leased import has_expired
from faststream_sqlbroker.policies.own_slots import OwnSlots
from faststream_sqlbroker.policies.read_time import ReadTime
from faststream_sqlbroker.policies.rows import Live, StatesOn


class QueueSlots:
    """The throttles of one queue in one claim whose slots belong to no message."""

    def __init__(
        self,
        states: States,
        queue: str,
        read: ReadTime,
        policies: Sequence[Policy],
        took: Sequence[float],
        rates: LiveRates,
    ) -> None:
        """Read what is known of the queue's own slots.

        No other claim changes `states` before this one is written. `took` is how long the last
        claims took, from reading the clock to the answer.
        """
        self._states = states
        self._read = read
        self._now = read.now
        # Throttles are numbered among themselves. Adding another policy must not change the scope
        # under which their slots are stored.
        throttles = list(enumerate(policy for policy in policies if isinstance(policy, Throttle)))
        self._lag = min((policy.max_lag for _, policy in throttles), default=None)
        self.lead = self._needed_lead(took)
        """Microseconds from now to the first slot that is granted: slots that come before the
        answer to COMMIT would be missed."""
        self._gates = [
            gate_of(policy, slot_scope(queue, n)).read(states, rates, self._now)
            for n, policy in throttles
            if policy.gates
        ]
        self._throttles = [gate.policy for gate in self._gates]
        self._logs = [gate.log for gate in self._gates]
        self._granted: list[int] | None = None
        self._look_before = AHEAD // 2
        """How long before a slot to look again (microseconds): so that the claim has ended when the
        slot comes; where no worker was free, not before the slot may be given to what waits."""

    def _needed_lead(self, took: Sequence[float]) -> int:
        longest = round(max(took, default=0.0) * MICROSECONDS)
        # Within half of max_lag the answer comes in time for a slot of now.
        return longest if self._lag is not None and longest > self._lag // 2 else 0

    @property
    def _until(self) -> int:
        """Slots up to this time are granted now: those that come while the next claim runs."""
        return self._now + 2 * self.lead + AHEAD

    @property
    def spent(self) -> bool:
        """Whether a lease spends a slot."""
        return self._lag is not None

    def room(self, limit: int, starts: int) -> int:
        """How many of `limit` messages may start within a short time, if so many workers are free.

        What would wait for a worker gets a slot only if that comes soon, and a handler that takes
        longer than usual does not make it miss the slot.
        """
        if not self._gates:
            return limit
        first = self._now + self.lead
        granted = next_slots(self._throttles, self._logs, first, self._until, limit)
        if not self.lead:
            soon = min(gate.policy.max_lag for gate in self._gates) // SLOT_SHARE
            count = sum(n < starts or at <= self._now + soon for n, at in enumerate(granted))
            if count < len(granted):
                self._look_before = soon
            granted = granted[:count]
        self._granted = granted
        return len(granted)

    def next_look(self, taken: int) -> int | None:
        """When to look again, if all slots that there are were taken."""
        if self._granted is None or taken < len(self._granted):
            return None
        logs = [log.copy().add(self._granted) for log in self._logs]
        next_slot = first_slot(self._throttles, logs, self._now + self.lead)
        return next_slot - self.lead - self._look_before

    def spend(self, starting: int) -> None:
        """Store the slots of so many messages that start."""
        granted = (self._granted or ())[:starting]
        for gate in self._gates:
            gate.keep(self._states, granted)

    def tell(self, starting: Sequence[ClaimedMessage]) -> dict[int, int]:
        """Tell the rows that start when they may; their slots by id."""
        if self._lag is None or not starting:
            return {}
        doubt = self._read.answered - self._read.asked
        started = {row.id: self._start(n, row) for n, row in enumerate(starting)}
        slots: dict[int, Slot] = {}  # a fast throttle gives many rows the same
        for row in starting:
            at = started[row.id]
            if at not in slots:
                # A clock that is read more slowly than max_lag leaves every slot in doubt: then a
                # start may be later than max_lag, by no more than twice that time.
                earliest = self._read.surely_after(at)
                latest = max(self._read.surely_before(at + self._lag), earliest + doubt)
                slots[at] = Slot(earliest, latest, at)
            row.slot = slots[at]
        return started

    def _start(self, number: int, row: ClaimedMessage) -> int:  # noqa: ARG002
        """When the message may start, the `number`th of those that do."""
        return self._now if self._granted is None else self._granted[number]


class Slots(QueueSlots):
    """The throttles of one queue in one claim, under the queue's lock; some by key, some that let
    no message wait.
    """

    def __init__(
        self,
        intake: Intake,
        read: ReadTime,
        policies: Sequence[Policy],
        took: Sequence[float],
    ) -> None:
        """As `QueueSlots`; `intake` is that of the same claim."""
        states = StatesOn(intake.rows, intake.connection)
        super().__init__(states, intake.queue, read, policies, took, intake.position.rates)
        self.own: OwnSlots | None = None
        """Those of a throttle that refuses what is above its rate."""
        self.keys: KeySlots | None = None
        """The slots of each key, if messages wait for those."""
        throttles = enumerate(p for p in policies if isinstance(p, Throttle))
        number, each = next(((n, p) for n, p in throttles if not p.gates), (0, None))
        if each is not None:
            when = self._now + self.lead, self._until if self.lead else self._now
            if each.when_exceeded == "wait":
                self.keys = KeySlots(intake, each, *when)
            else:
                self.own = OwnSlots(intake, each, number, *when)
        self._again: dict[int, int] = {}
        self.later: list[int] = []
        """The slots of messages that were put off."""

    def on_time(self, chosen: Sequence[int], live: Mapping[int, Live], limit: int) -> list[int]:
        """Up to `limit` of `chosen` that may start; each takes the slot that it needs."""
        if self.keys is not None:
            return self._of_keys(self.keys, chosen, live, limit)
        if self.own is not None:
            starting = self.own.on_time(chosen, live, limit)
            self.later += self.own.later
            return starting
        return list(chosen[:limit])

    def _of_keys(
        self, keys: KeySlots, chosen: Sequence[int], live: Mapping[int, Live], limit: int
    ) -> list[int]:
        """Up to `limit` of `chosen` that expire, or take a slot of their key now."""
        keys.look(key for i in chosen if i in live and (key := live[i].key) is not None)
        starting: list[int] = []
        taken: list[str] = []
        for message in chosen:
            if len(starting) == limit:
                break
            if message not in live:
                continue
            key = live[message].key
            if live[message].expired or key is None:
                self._again[message] = self._now
            elif (slot := keys.take(key)) is not None:
                self._again[message] = slot
                taken.append(key)
            else:
                continue
            starting.append(message)
        keys.keep(taken)
        return starting

    def give(self, rows: Sequence[ClaimedMessage]) -> int:
        """Tell each row when it may start, and store the slots taken; how many rows start."""
        starting = [row for row in rows if row.outcome is None and not has_expired(row)]
        self.spend(len(starting))
        started = self.tell(starting)
        if self.own is not None:
            self.own.keep(started)
        return len(starting)

    def _start(self, number: int, row: ClaimedMessage) -> int:
        shared = super()._start(number, row)
        if self.own is not None:
            return max(shared, self.own.slot(row.id))
        return self._again.get(row.id, shared)
