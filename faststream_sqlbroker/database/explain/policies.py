"""Why each policy makes a message wait: each brings a function of its own.

The facts are what the policies of one queue know: read when it is asked for, once, in one
snapshot. One message is asked about, or many: `expect` makes the facts of many keys one read.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, Row, Select, case, select, text

from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Delay,
    KeepLast,
    Once,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies.debounce import Bursts, waiting_in
from faststream_sqlbroker.core.policies.flags import BURST, HEADER_KEY, HELD_DELAY, PUT_OFF
from faststream_sqlbroker.core.policies.keep_last import Latest
from faststream_sqlbroker.core.policies.options import MICROSECONDS, seconds
from faststream_sqlbroker.core.policies.standby import STANDBY, chosen_for, stands_by
from faststream_sqlbroker.core.policies.throttle import KnownSlots, known_slots
from faststream_sqlbroker.core.status import LiveSubscriber, Reason, WaitingMessage, moment_text
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.policy_state import ONCE
from faststream_sqlbroker.database.policies.intake import burst_scope, slot_scope
from faststream_sqlbroker.database.policies.other_processes import SHARED_LEASES
from faststream_sqlbroker.database.policies.rows import Live, PolicyRows
from faststream_sqlbroker.database.policies.slot_use import SHARED_SLOTS

MOST_LEASES = 10_000
"""Leases of the keys asked about that are read at most."""
P = TypeVar("P", bound=Policy)
_LEASED = text("state = 'PROCESSING' AND lease_expires_at IS NOT NULL")
"""Literals: SQLite finds a partial index by them."""


Lease = Row[tuple[int, str | None, UUID]]
"""The id, key and token of a message that a subscriber has leased."""


class PolicyFacts:
    """The state of the policies of `queue` at the database's time `now`."""

    def __init__(
        self, rows: PolicyRows, now: datetime, subscribers: Sequence[LiveSubscriber]
    ) -> None:
        """`rows` are used to read only; `subscribers` are the live ones of the queue."""
        self.connection = rows.connection
        self._rows = rows
        self._running: dict[int, int] = {}
        self._shared: dict[str, int] = {}
        self._expected: set[str] = set()
        self._bursts: dict[str, Bursts] = {}
        self._slots: dict[str, KnownSlots | None] = {}
        self._live: dict[int, Live] = {}
        self._leases: dict[str, list[Lease]] = {}
        self._claimed: dict[str, Any] = {}
        self.queue = rows.queue
        self.now = now
        self.subscribers = subscribers

    @property
    def dialect(self) -> Dialect:
        """That of the connection."""
        return self._rows.dialect

    @property
    def ordered(self) -> bool:
        """Whether a live subscriber of the queue keeps the order of keys."""
        return any(subscriber.ordered for subscriber in self.subscribers)

    def policies(self, kind: type[P]) -> list[P]:
        """Those of this kind that live subscribers have, one of each text, by text."""
        return [policy for _, policy in self._numbered(kind, by_number=False)]

    def _numbered(self, kind: type[P], *, by_number: bool = True) -> list[tuple[int, P]]:
        """The same with their numbers among their like, by which their states are stored."""
        found: dict[tuple[int, str], P] = {}
        for subscriber in self.subscribers:
            like = [policy for policy in subscriber.rules if isinstance(policy, kind)]
            for number, policy in enumerate(like):
                found.setdefault((number if by_number else 0, str(policy)), policy)
        return [(number, found[number, text]) for number, text in sorted(found)]

    def expect(self, keys: Iterable[str | None]) -> None:
        """From now on, what is known of `keys` is read together."""
        self._expected |= {key for key in keys if key is not None}

    def worker(self, token: UUID | None) -> str | None:
        """The live subscriber that gave a lease this token."""
        return next((s.worker for s in self.subscribers if s.holds(token)), None)

    # -- of the queue --------------------------------------------------------------------------

    @cached_property
    def next_slots(self) -> list[tuple[Throttle, KnownSlots]]:
        """The throttles whose slots are all taken, and when each has the next."""
        found = []
        now = to_microseconds(self.now)
        for number, policy in self._numbered(Throttle):
            shared = policy.scope
            scope = slot_scope(self.queue, number) if shared is None else SHARED_SLOTS
            key = shared or ""
            slots = known_slots(self._rows.states(scope, [key]).get(key))
            if slots is not None and slots.next > now:
                found.append((policy, slots))
        return sorted(found, key=lambda each: -each[1].next)

    def key_slots(self, key: str | None) -> list[tuple[Throttle, KnownSlots]]:
        """The throttles by key of which this key has no slot, and when it has the next."""
        by_key = [each for each in self.policies(Throttle) if each.key]
        if key is None or not by_key:
            return []
        if key not in self._slots:
            scope = slot_scope(self.queue)
            keys = {*self._expected, key}
            known = self._rows.states(scope, keys)
            self._slots |= {each: known_slots(known.get(each)) for each in keys}
        slots = self._slots[key]
        if slots is None or slots.next <= to_microseconds(self.now):
            return []
        return [(policy, slots) for policy in by_key]

    @cached_property
    def closed(self) -> tuple[Window, int] | None:
        """The window that opens first, and when (microseconds); None: a subscriber may take now."""
        now = to_microseconds(self.now)
        first: list[tuple[Window, int]] = []
        for subscriber in self.subscribers:
            windows = [each for each in subscriber.rules if isinstance(each, Window)]
            ahead = [(w, opens) for w in windows if (opens := w.span(now)[0]) > now]
            if not ahead:
                return None
            first.append(max(ahead, key=lambda each: each[1]))
        return min(first, key=lambda each: each[1], default=None)

    def running(self, most: int) -> int:
        """Leases of the queue, counted up to `most`."""
        if most not in self._running:
            self._running[most] = self._rows.running(self.queue, most)
        return self._running[most]

    def running_of(self, scope: str, most: int) -> int:
        """Leases of all queues of a budget, each counted up to `most`."""
        if scope not in self._shared:
            info = self._rows.states(SHARED_LEASES, [scope]).get(scope) or {}
            self._shared[scope] = sum(
                self._rows.running(queue, most)
                for queue in sorted({*info.get("queues", ()), self.queue})
            )
        return self._shared[scope]

    @cached_property
    def first_lease(self) -> Lease | None:
        """The leased message with the lowest id."""
        return self.connection.execute(self._leased.limit(1)).first()

    # -- of keys -------------------------------------------------------------------------------

    def bursts(self, key: str) -> tuple[Bursts, dict[int, Live]]:
        """The bursts of `key`, and those of its messages that are in the queue."""
        if key not in self._bursts:
            wanted = (self._expected | {key}) - self._bursts.keys()
            states = self._rows.states(burst_scope(self.queue), wanted)
            found = {each: Bursts.load(states.get(each)) for each in wanted}
            ids = {message for bursts in found.values() for message in bursts.known()}
            self._live |= self._rows.live(ids)
            self._bursts |= found
        bursts = self._bursts[key]
        return bursts, {i: self._live[i] for i in bursts.known() if i in self._live}

    def standby(self, key: str) -> tuple[list[int], dict[int, Live]]:
        """The messages of `key` that are to be delivered in the place of others, and those of them
        that are in the queue.
        """
        state = self._rows.states(burst_scope(self.queue), [key]).get(key)
        waiting = waiting_in(state or {})
        return waiting, self._rows.live(waiting)

    def newest(self, key: str) -> tuple[Latest, dict[int, Live]]:
        """The same for KeepLast, which keeps what it knows in the same place."""
        state = self._rows.states(burst_scope(self.queue), [key]).get(key)
        latest = Latest.load(state)
        return latest, self._rows.live(latest.known())

    def leases(self, key: str) -> list[Lease]:
        """The leased messages of `key`, by id."""
        if key not in self._leases:
            wanted = (self._expected | {key}) - self._leases.keys()
            self._leases |= {each: [] for each in wanted}
            of_keys = self._leased.where(self._key.in_(sorted(wanted))).limit(MOST_LEASES)
            for lease in self.connection.execute(of_keys):
                if lease.key in self._leases:
                    self._leases[lease.key].append(lease)
        return self._leases[key]

    def claimed(self, key: str) -> Any:
        """Return the row of `key` for `Once`, with `info` and `created_at`; None: it is free."""
        if key not in self._claimed:
            wanted = (self._expected | {key}) - self._claimed.keys()
            self._claimed |= dict.fromkeys(wanted)
            c = self.dialect.tables.policy_state.c
            found = select(c.key, c.info, c.created_at).where(
                c.scope == ONCE + self.queue, c.key.in_(sorted(wanted))
            )
            self._claimed |= {row.key: row for row in self.connection.execute(found)}
        return self._claimed[key]

    @property
    def _key(self) -> ColumnElement[str]:
        """What policies go by."""
        c = self.dialect.tables.message.c
        return case((c.policy_marks.op("&")(HEADER_KEY) != 0, c.policy_key), else_=c.key)

    @property
    def _leased(self) -> Select[Any]:
        table = self.dialect.tables.message
        columns = table.c.id, self._key.label("key"), table.c.lease_token.label("token")
        found = select(*columns)
        # A key may have many messages, but few are leased.
        found = self.dialect.use_index(found, table, "leased_index", on_sqlite=True)
        return found.where(table.c.queue == self.queue, _LEASED).order_by(table.c.id)


def delay(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether it waits for its delay. Later policies, and retries, have due times of their own."""
    delays = facts.policies(Delay)
    if (
        not delays
        or not message.policy_marks & HELD_DELAY
        or message.next_attempt_at <= message.now
    ):
        return []
    until = message.next_attempt_at
    words = f"it is not due before {moment_text(until, message.now)}, by {delays[0]}"
    return [Reason("delayed", words, until=until, policy=str(delays[0]))]


def standby(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether another message of its key is to be delivered in its place."""
    if not is_standing(message):
        return []
    again = max(message.now, message.next_attempt_at - timedelta(microseconds=STANDBY))
    bursts, live = ([], {}) if message.key is None else facts.standby(message.key)
    policies: list[Debounce | KeepLast] = [*facts.policies(Debounce), *facts.policies(KeepLast)]
    by = chosen_for(bursts, message.id, leading=any(policy.leading for policy in policies))
    policy = str(policies[0]) if policies else None
    if by is None or by not in live:
        words = (
            "another message of its key was to be delivered in its place; it is looked at again "
            f"at {moment_text(again, message.now)}"
        )
        return [Reason("in_burst", words, message_id=by, until=again, policy=policy)]
    until = from_microseconds(live[by].due)
    words = (
        f"message {by} of its key is delivered in its place, which is due at "
        f"{moment_text(until, message.now)}; if that one cannot be, this one goes"
    )
    return [Reason("in_burst", words, message_id=by, until=until, policy=policy)]


def is_standing(message: WaitingMessage) -> bool:
    """Whether it stands by; then only `standby` says why it waits."""
    return stands_by(to_microseconds(message.next_attempt_at), message.policy_marks)


def window(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether every live subscriber is outside of its window."""
    if facts.closed is None:
        return []
    closed, opens = facts.closed
    until = from_microseconds(opens)
    words = f"it is outside of {closed}, which opens at {moment_text(until, message.now)}"
    return [Reason("outside_window", words, until=until, policy=str(closed))]


def burst(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether its burst goes on, or another message of its key comes first."""
    debounces = facts.policies(Debounce)
    if message.key is None or not message.policy_marks & BURST or not debounces:
        return []
    bursts, live = facts.bursts(message.key)
    turn = bursts.next(set(live))
    if turn is not None and turn != message.id:
        return [_behind(facts, message.key, turn, live[turn], debounces[0])]
    if message.id == bursts.newest and message.next_attempt_at > message.now:
        words = (
            "it is the newest message of a burst of its key, which ends at "
            f"{moment_text(message.next_attempt_at, message.now)} if no other comes"
        )
        return [Reason("in_burst", words, until=message.next_attempt_at, policy=str(debounces[0]))]
    return []


def newest(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether another message of its key runs, or its window goes on."""
    policies = facts.policies(KeepLast)
    if message.key is None or not message.policy_marks & BURST or not policies:
        return []
    latest, live = facts.newest(message.key)
    running = next((i for i, known in live.items() if known.state == "PROCESSING"), None)
    if running is not None and running != message.id:
        return [_behind(facts, message.key, running, live[running], policies[0])]
    if message.id == latest.newest and message.next_attempt_at > message.now:
        words = (
            "it is the newest message of its key, which may have the next at "
            f"{moment_text(message.next_attempt_at, message.now)}"
        )
        return [Reason("in_burst", words, until=message.next_attempt_at, policy=str(policies[0]))]
    return []


def _behind(facts: PolicyFacts, key: str, other: int, known: Live, policy: Policy) -> Reason:
    """It waits until the message `other` of its key has settled."""
    token = next((each.token for each in facts.leases(key) if each.id == other), None)
    name = facts.worker(token)
    doing = f"{name} has it" if name else f"it is {known.state}"
    words = f"message {other} of its key comes first, and it waits until that has settled: {doing}"
    return Reason("key_held", words, message_id=other, worker=name, policy=str(policy))


def slot(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether there is no slot for it yet; the throttle with the latest slot first."""
    throttles = facts.policies(Throttle)
    if not throttles:
        return []
    if message.policy_marks & PUT_OFF and message.next_attempt_at > message.now:
        own = next((each for each in throttles if each.when_exceeded != "wait"), throttles[0])
        until = message.next_attempt_at
        words = f"it asks for a slot of {own} again at {moment_text(until, message.now)}"
        return [Reason("throttled", words, until=until, policy=str(own))]
    found = []
    for throttle, slots in [*facts.next_slots, *facts.key_slots(message.key)]:
        until = from_microseconds(slots.next)
        words = f"every slot of {throttle} is taken until {moment_text(until, message.now)}"
        words += _rate_left(throttle, slots.lag)
        found.append(Reason("throttled", words, until=until, policy=str(throttle)))
    return found


def _rate_left(throttle: Throttle, lag: int) -> str:
    """What the lateness of starts leaves of the rate, if that is less than nearly all."""
    if lag * 20 < throttle.per:
        return ""
    left = throttle.rate * throttle.per / (throttle.per + lag)
    return (
        f"; starts come up to {lag / MICROSECONDS:.2f} s after their slots, which leaves "
        f"{left:.3g} of {throttle.rate} in {seconds(throttle.per)}"
    )


def concurrency(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether as many messages are leased as may be."""
    found = []
    for policy in facts.policies(Concurrency):
        limit = policy.limit
        if policy.per_key:
            leases = [] if message.key is None else facts.leases(message.key)
            first = leases[0] if len(leases) >= limit else None
        elif (scope := policy.scope) is not None:
            if facts.running_of(scope, limit) >= limit:
                words = f"{limit} of {limit} leases of the scope {scope!r} are taken ({policy})"
                found.append(Reason("concurrency", words, policy=str(policy)))
            continue
        else:
            first = facts.first_lease if facts.running(limit) >= limit else None
        if first is None:
            continue
        name = facts.worker(first.token)
        whose = "its key" if policy.per_key else "the queue"
        words = (
            f"{limit} of {limit} leases of {whose} are taken ({policy}): "
            f"message {first.id} is held by {name or 'a subscriber that is not listed'}"
        )
        code = "key_held" if policy.per_key else "concurrency"
        found.append(Reason(code, words, message_id=first.id, worker=name, policy=str(policy)))
    return found


def once(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether its key has been claimed already."""
    policies = facts.policies(Once)
    state = None if message.key is None or not policies else facts.claimed(message.key)
    if state is None:
        return []
    ends = state.created_at + timedelta(seconds=state.info["ttl"])
    started_here = state.info["message"] == message.id and message.deliveries_count > 0
    if ends <= message.now and not started_here:
        return []
    other = state.info["message"]
    until = moment_text(ends, message.now)
    if other == message.id:
        words = (
            "its handler was started before, and it is not known how far it got: "
            "the next claim makes the message FAILED"
        )
        return [Reason("unknown_outcome", words, policy=str(policies[0]))]
    words = (
        f"its key was claimed by message {other}, until {until}: "
        "the next claim discards it as a duplicate"
    )
    return [Reason("duplicate", words, message_id=other, policy=str(policies[0]))]


Explain = Callable[[PolicyFacts, WaitingMessage], list[Reason]]
"""Gets what the policies of the message's queue know, and the message; only reads."""

EXPLAINERS: list[Explain] = [
    window,
    burst,
    newest,
    slot,
    concurrency,
    once,
]
"""In the order in which their reasons are listed."""


def policy_reasons(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Why policies keep `message` from its handler; nothing if they do not, or if it stands by."""
    if is_standing(message):
        return []
    return [reason for explain in EXPLAINERS for reason in explain(facts, message)]
