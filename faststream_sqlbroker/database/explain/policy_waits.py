"""Explain why each policy makes a message wait: each policy has a function.

`PolicyDetails` is the state of the policies of one queue, each part read on demand, once, in
one snapshot. `expect_messages` makes the reads of many keys one read.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, LargeBinary, Row, Select, case, cast, select, text

from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Delay,
    Header,
    KeepLast,
    Once,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS, format_seconds
from faststream_sqlbroker.core.policies.debounce import Bursts, list_waiting
from faststream_sqlbroker.core.policies.flags import BURST, HEADER_KEY, HELD_DELAY, POSTPONED
from faststream_sqlbroker.core.policies.keep_last import Latest
from faststream_sqlbroker.core.policies.standby import STANDBY, find_target, has_standby_flags
from faststream_sqlbroker.core.policies.throttle import SlotForecast, read_forecast
from faststream_sqlbroker.core.status import (
    LiveSubscriber,
    Reason,
    WaitingMessage,
    find_holder,
    format_timestamp,
)
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.policy_state import ONCE
from faststream_sqlbroker.database.policies.intake import get_burst_scope, get_slot_scope
from faststream_sqlbroker.database.policies.other_processes import SHARED_LEASES
from faststream_sqlbroker.database.policies.rows import PolicyRows, QueuedMessage, as_key
from faststream_sqlbroker.database.policies.slot_use import SHARED_SLOTS

MAX_LEASES = 10_000
"""Maximum leases of the requested keys that are read."""
P = TypeVar("P", bound=Policy)
_LEASED = text("state = 'PROCESSING' AND lease_expires_at IS NOT NULL")
"""Literals: SQLite finds a partial index by them."""


Lease = Row[tuple[int, str | None, UUID]]
"""The id, key and token of a leased message."""


class PolicyDetails:
    """The state of the policies of `queue` at the database's time `now`."""

    def __init__(
        self, rows: PolicyRows, now: datetime, subscribers: Sequence[LiveSubscriber]
    ) -> None:
        """`rows` is only read; `subscribers` are the live subscribers of the queue."""
        self.connection = rows.connection
        self._rows = rows
        self._lease_counts: dict[tuple[str | None, int], int] = {}
        self._expected: set[str] = set()
        self._expected_ids: set[int] = set()
        self._once_keys: dict[int, str | None] = {}
        self._bursts: dict[str, Any] = {}
        self._slots: dict[str, SlotForecast | None] = {}
        self._queued: dict[int, QueuedMessage] = {}
        self._leases: dict[str, list[Lease]] = {}
        self._claim_rows: dict[str, Any] = {}
        self.queue = rows.queue
        self.now = now
        self.subscribers = subscribers

    @property
    def dialect(self) -> Dialect:
        """The dialect of the connection."""
        return self._rows.dialect

    @property
    def is_ordered(self) -> bool:
        """True if a live subscriber of the queue keeps the order of keys."""
        return any(subscriber.ordered for subscriber in self.subscribers)

    def list_policies(self, kind: type[P]) -> list[P]:
        """Return the distinct policies of this kind of live subscribers, by text."""
        return [policy for _, policy in self._list_numbered(kind, by_number=False)]

    def _list_numbered(self, kind: type[P], *, by_number: bool = True) -> list[tuple[int, P]]:
        """Return distinct policies with their number among policies of this kind.

        The states of throttles are stored by that number. Live subscribers may have different
        policies, so several may have one number. Without `by_number`, equal policies count once, as
        number 0.
        """
        policies: dict[tuple[int, str], P] = {}
        for subscriber in self.subscribers:
            same_kind = [policy for policy in subscriber.rules if isinstance(policy, kind)]
            for number, policy in enumerate(same_kind):
                policies.setdefault((number if by_number else 0, str(policy)), policy)
        return [(number, policies[number, text]) for number, text in sorted(policies)]

    def expect_messages(self, messages: Sequence[WaitingMessage]) -> None:
        """Read the state of the keys of `messages` together from now on.

        The first question about any key then reads all of them in one statement.
        """
        self._expected_ids |= {message.id for message in messages}
        self._expected |= {message.key for message in messages if message.key is not None}

    # -- state of the queue --------------------------------------------------------------------

    @cached_property
    def next_slots(self) -> list[tuple[Throttle, SlotForecast]]:
        """The throttles whose slots are all taken, and the next slot of each.

        A slot is a time at which a throttle lets one message start. Without throttles by key; the
        latest slot comes first.
        """
        throttles = []
        now = to_microseconds(self.now)
        for number, policy in self._list_numbered(Throttle):
            shared = policy.scope
            scope = get_slot_scope(self.queue, number) if shared is None else SHARED_SLOTS
            key = shared or ""
            slots = read_forecast(self._rows.load_states(scope, [key]).get(key))
            if slots is not None and slots.next > now:
                throttles.append((policy, slots))
        return sorted(throttles, key=lambda throttle: -throttle[1].next)

    def load_key_slots(self, key: str | None) -> list[tuple[Throttle, SlotForecast]]:
        """Return the throttles by key of which this key has no slot, and the next slot.

        A slot is a time at which a throttle lets one message of the key start.
        """
        by_key = [item for item in self.list_policies(Throttle) if item.key]
        if key is None or not by_key:
            return []
        if key not in self._slots:
            scope = get_slot_scope(self.queue)
            keys = {*self._expected, key}
            states = self._rows.load_states(scope, keys)
            self._slots |= {item: read_forecast(states.get(item)) for item in keys}
        slots = self._slots[key]
        if slots is None or slots.next <= to_microseconds(self.now):
            return []
        return [(policy, slots) for policy in by_key]

    @cached_property
    def closed_window(self) -> tuple[Window, int] | None:
        """The Window that opens first, and when; None if a subscriber may claim now.

        A message waits for a Window only if every live subscriber is outside of its own. Of a
        subscriber with several closed windows, the last to open counts. In microseconds since 1970.
        """
        now = to_microseconds(self.now)
        last_openings: list[tuple[Window, int]] = []
        for subscriber in self.subscribers:
            windows = [item for item in subscriber.rules if isinstance(item, Window)]
            closed = [(window, opens) for window in windows if (opens := window.span(now)[0]) > now]
            if not closed:
                return None
            last_openings.append(max(closed, key=lambda item: item[1]))
        return min(last_openings, key=lambda item: item[1], default=None)

    def count_leases(self, scope: str | None, maximum: int) -> int:
        """Count the leases of the queue, or of each queue of `scope`, each up to `maximum`.

        A scope is a limit that several queues share. Its row in the policy state lists the queues
        that have leases.
        """
        if (scope, maximum) not in self._lease_counts:
            queues = {self.queue}
            if scope is not None:
                info = self._rows.load_states(SHARED_LEASES, [scope]).get(scope) or {}
                queues.update(info.get("queues", ()))
            counts = [self._rows.count_leases(queue, maximum) for queue in sorted(queues)]
            self._lease_counts[scope, maximum] = sum(counts)
        return self._lease_counts[scope, maximum]

    @cached_property
    def first_lease(self) -> Lease | None:
        """The leased message with the lowest id."""
        return self.connection.execute(self._select_leased.limit(1)).first()

    # -- state of keys -------------------------------------------------------------------------

    def load_bursts(self, key: str) -> tuple[Any, dict[int, QueuedMessage]]:
        """Return the state of `key` under Debounce or KeepLast, and queued messages by id.

        These include the messages that the state names and that are in the queue. Reads all
        expected keys at once.
        """
        if key not in self._bursts:
            missing = (self._expected | {key}) - self._bursts.keys()
            states = self._rows.load_states(get_burst_scope(self.queue), missing)
            self._bursts |= {missing_key: states.get(missing_key) or {} for missing_key in missing}
            self._queued |= self._rows.load_messages(
                i
                for info in states.values()
                for i in (*Bursts.load(info).list_messages(), *Latest.load(info).list_messages())
            )
        return self._bursts[key], self._queued

    def load_leases(self, key: str) -> list[Lease]:
        """Return the leased messages of `key`, by id.

        Reads all expected keys at once. At most `MAX_LEASES` are read, so some may be missing.
        """
        if key not in self._leases:
            missing = (self._expected | {key}) - self._leases.keys()
            self._leases |= {missing_key: [] for missing_key in missing}
            statement = self._select_leased.where(self._key_column.in_(sorted(missing))).limit(
                MAX_LEASES
            )
            for lease in self.connection.execute(statement):
                if lease.key in self._leases:
                    self._leases[lease.key].append(lease)
        return self._leases[key]

    def load_once_key(self, policy: Once, message: WaitingMessage) -> str | None:
        """Return the key of `message` for `policy`, which may be another than the claims' key.

        Reads those of all expected messages at once.
        """
        header = policy.key if isinstance(policy.key, Header) else None
        if header is None and not message.policy_marks & HEADER_KEY:
            return message.key
        if message.id not in self._once_keys:
            ids = sorted(self._expected_ids | {message.id})
            if header is not None:
                stored = self._rows.read_headers(ids)
                keys = {i: header.key(load_headers(stored.get(i))) for i in ids}
            else:
                keys = self._read_keys(ids)
            self._once_keys |= {i: keys.get(i) for i in ids}
            self._expected |= {key for key in keys.values() if key is not None}
        return self._once_keys[message.id]

    def _read_keys(self, ids: list[int]) -> dict[int, str | None]:
        c = self.dialect.tables.message.c
        # SQLite: another program may have stored bytes that are no text.
        key = cast(c.key, LargeBinary) if self.dialect.one_writer else c.key
        statement = select(c.id, key.label("key")).where(c.queue == self.queue, c.id.in_(ids))
        return {row.id: as_key(row.key) for row in self.connection.execute(statement)}

    def load_claim(self, key: str) -> Any:
        """Return the row that claims `key` for the policy Once; None if the key is free.

        With `info` (the message, its worker and the time to live) and `created_at`. Reads all
        expected keys at once.
        """
        if key not in self._claim_rows:
            missing = (self._expected | {key}) - self._claim_rows.keys()
            self._claim_rows |= dict.fromkeys(missing)
            c = self.dialect.tables.policy_state.c
            statement = select(c.key, c.info, c.created_at).where(
                c.scope == ONCE + self.queue, c.key.in_(sorted(missing))
            )
            self._claim_rows |= {row.key: row for row in self.connection.execute(statement)}
        return self._claim_rows[key]

    @property
    def _key_column(self) -> ColumnElement[str]:
        """The key that policies use."""
        c = self.dialect.tables.message.c
        return case((c.policy_marks.op("&")(HEADER_KEY) != 0, c.policy_key), else_=c.key)

    @property
    def _select_leased(self) -> Select[Any]:
        """The leased messages of the queue, with the keys that policies use, by id.

        A statement: callers add a condition or a limit.
        """
        table = self.dialect.tables.message
        columns = table.c.id, self._key_column.label("key"), table.c.lease_token.label("token")
        statement = select(*columns)
        # A key may have many messages, but few are leased.
        statement = self.dialect.add_index_hint(statement, table, "leased_index", on_sqlite=True)
        return statement.where(table.c.queue == self.queue, _LEASED).order_by(table.c.id)


def explain_delay(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Explain a wait for the Delay that has set the due time.

    Later policies, and retries, set due times of their own: then the flag of the Delay is cleared.
    """
    delays = details.list_policies(Delay)
    if (
        not delays
        or not message.policy_marks & HELD_DELAY
        or message.next_attempt_at <= message.now
    ):
        return []
    until = message.next_attempt_at
    description = f"{delays[0]} delays it until {format_timestamp(until, message.now)}"
    return [Reason("delayed", description, until=until, policy=str(delays[0]))]


def explain_standby(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Explain that another message of the key is to be delivered in place of this message.

    This message stays in the queue until then: it is delivered if the other message expires, is
    cancelled or is moved.
    """
    if not is_standby(message):
        return []
    next_check = max(message.now, message.next_attempt_at - timedelta(microseconds=STANDBY))
    info, queued = ({}, {}) if message.key is None else details.load_bursts(message.key)
    policies: list[Debounce | KeepLast] = [
        *details.list_policies(Debounce),
        *details.list_policies(KeepLast),
    ]
    leading = any(policy.leading for policy in policies)
    owner = find_target(list_waiting(info), message.id, leading=leading)
    policy = str(policies[0]) if policies else None
    if owner is None or owner not in queued:
        description = (
            "it stands by for another message of its key, which was not found; the "
            f"next check is at {format_timestamp(next_check, message.now)}"
        )
        return [Reason("in_burst", description, message_id=owner, until=next_check, policy=policy)]
    until = from_microseconds(queued[owner].due)
    description = (
        f"message {owner} of its key is delivered in its place and is due at "
        f"{format_timestamp(until, message.now)}; if it cannot be delivered, this message is"
    )
    return [Reason("in_burst", description, message_id=owner, until=until, policy=policy)]


def is_standby(message: WaitingMessage) -> bool:
    """Return True if the message stands by; then only `explain_standby` explains the wait."""
    return has_standby_flags(to_microseconds(message.next_attempt_at), message.policy_marks)


def explain_window(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Explain that the Window of every live subscriber is closed.

    If a subscriber may claim now, no Window keeps the message waiting.
    """
    if details.closed_window is None:
        return []
    closed, opens = details.closed_window
    until = from_microseconds(opens)
    description = f"{closed} is closed and opens at {format_timestamp(until, message.now)}"
    return [Reason("outside_window", description, until=until, policy=str(closed))]


def explain_burst(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Explain that the burst goes on, or that another message of the key comes first.

    A burst is a series of messages of one key. Debounce delivers one of them, when the burst has
    ended or, with the leading edge, at its start.
    """
    debounces = details.list_policies(Debounce)
    if message.key is None or not message.policy_marks & BURST or not debounces:
        return []
    info, queued = details.load_bursts(message.key)
    bursts = Bursts.load(info)
    other = bursts.find_next(queued.keys())
    if other is not None and other != message.id:
        return [_build_key_held(details, message.key, other, queued[other], debounces[0])]
    if message.id == bursts.newest and message.next_attempt_at > message.now:
        description = (
            "it is the newest message of a burst of its key, which ends at "
            f"{format_timestamp(message.next_attempt_at, message.now)} if no other arrives"
        )
        return [
            Reason("in_burst", description, until=message.next_attempt_at, policy=str(debounces[0]))
        ]
    return []


def explain_latest(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Explain that another message of the key runs, or that the window goes on.

    KeepLast delivers the newest message of a key when the window that began with the last delivery
    is over, and no message of the key runs.
    """
    policies = details.list_policies(KeepLast)
    if message.key is None or not message.policy_marks & BURST or not policies:
        return []
    info, queued = details.load_bursts(message.key)
    latest = Latest.load(info)
    running = next(
        (i for i in latest.list_messages() if i in queued and queued[i].state == "PROCESSING"),
        None,
    )
    if running is not None and running != message.id:
        return [_build_key_held(details, message.key, running, queued[running], policies[0])]
    if message.id == latest.newest and message.next_attempt_at > message.now:
        description = (
            "it is the newest message of its key, and may start at "
            f"{format_timestamp(message.next_attempt_at, message.now)}"
        )
        return [
            Reason("in_burst", description, until=message.next_attempt_at, policy=str(policies[0]))
        ]
    return []


def _build_key_held(
    details: PolicyDetails, key: str, other: int, queued: QueuedMessage, policy: Policy
) -> Reason:
    """Build the reason that the message waits until the message `other` of the key has settled."""
    token = next((lease.token for lease in details.load_leases(key) if lease.id == other), None)
    name = find_holder(details.subscribers, token)
    status = f"{name} holds that message" if name else f"that message is {queued.state}"
    description = f"it waits until message {other} of its key has settled; {status}"
    return Reason("key_held", description, message_id=other, worker=name, policy=str(policy))


def explain_throttle(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Explain that there is no slot yet; throttles by key come last, the others by slot, the latest
    first.

    A slot is a time at which a throttle lets one message start. A refusing throttle has given the
    message the due time of its next request for a slot.
    """
    throttles = details.list_policies(Throttle)
    if not throttles:
        return []
    if message.policy_marks & POSTPONED and message.next_attempt_at > message.now:
        refusing = next(
            (policy for policy in throttles if policy.when_exceeded != "wait"), throttles[0]
        )
        until = message.next_attempt_at
        description = (
            f"it requests a slot of {refusing} again at {format_timestamp(until, message.now)}"
        )
        return [Reason("throttled", description, until=until, policy=str(refusing))]
    reasons = []
    for throttle, slots in [*details.next_slots, *details.load_key_slots(message.key)]:
        until = from_microseconds(slots.next)
        description = (
            f"every slot of {throttle} is taken until {format_timestamp(until, message.now)}"
        )
        description += _format_rate_loss(throttle, slots.lag)
        reasons.append(Reason("throttled", description, until=until, policy=str(throttle)))
    return reasons


def _format_rate_loss(throttle: Throttle, lag: int) -> str:
    """Describe the rate that late starts leave; empty if they cost less than 5 % of the period.

    A throttle counts a start at its latest possible time, so late starts delay the next slots.
    """
    if lag * 20 < throttle.per:
        return ""
    remaining_rate = throttle.rate * throttle.per / (throttle.per + lag)
    return (
        f"; handlers start up to {lag / MICROSECONDS:.2f} s after their slots, which reduces the "
        f"rate to {remaining_rate:.3g} of {throttle.rate} in {format_seconds(throttle.per)}"
    )


def explain_concurrency(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Explain that the maximum number of messages is leased.

    Of the queue, of the message's key, or of all queues of a scope. Except for a scope, names a
    leased message, which need not be the next to end.
    """
    reasons = []
    for policy in details.list_policies(Concurrency):
        limit = policy.limit
        if policy.per_key:
            leases = [] if message.key is None else details.load_leases(message.key)
            first = leases[0] if len(leases) >= limit else None
        elif (scope := policy.scope) is not None:
            if details.count_leases(scope, limit) >= limit:
                description = (
                    f"{limit} of {limit} leases of the scope {scope!r} are in use ({policy})"
                )
                reasons.append(Reason("concurrency", description, policy=str(policy)))
            continue
        else:
            first = details.first_lease if details.count_leases(None, limit) >= limit else None
        if first is None:
            continue
        name = find_holder(details.subscribers, first.token)
        limit_target = "its key" if policy.per_key else "the queue"
        description = (
            f"{limit} of {limit} leases of {limit_target} are in use ({policy}); "
            f"{name or 'an unlisted subscriber'} holds message {first.id}"
        )
        code = "key_held" if policy.per_key else "concurrency"
        reasons.append(
            Reason(code, description, message_id=first.id, worker=name, policy=str(policy))
        )
    return reasons


def explain_once(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Explain that the key has been claimed already.

    Then the message will not be handled: the next claim ends it as a duplicate, or as FAILED if an
    earlier delivery of it started its handler and the outcome is unknown.
    """
    policies = details.list_policies(Once)
    key = details.load_once_key(policies[0], message) if policies else None
    state = None if key is None else details.load_claim(key)
    if state is None:
        return []
    ends = state.created_at + timedelta(seconds=state.info["ttl"])
    # An expired claim counts only against a further delivery of the message that made it.
    started_here = state.info["message"] == message.id and message.deliveries_count > 0
    if ends <= message.now and not started_here:
        return []
    other = state.info["message"]
    until = format_timestamp(ends, message.now)
    if other == message.id:
        description = (
            "an earlier delivery started its handler, and the outcome is unknown; "
            "the next claim ends the message as FAILED"
        )
        return [Reason("unknown_outcome", description, policy=str(policies[0]))]
    description = (
        f"message {other} has claimed its key until {until}; "
        "the next claim discards this message as a duplicate"
    )
    return [Reason("duplicate", description, message_id=other, policy=str(policies[0]))]


Explainer = Callable[[PolicyDetails, WaitingMessage], list[Reason]]
"""Gets the policy details of the message's queue, and the message; only reads."""

EXPLAINERS: list[Explainer] = [
    explain_window,
    explain_burst,
    explain_latest,
    explain_throttle,
    explain_concurrency,
    explain_once,
]
"""In the order in which their reasons are listed."""


def explain_policies(details: PolicyDetails, message: WaitingMessage) -> list[Reason]:
    """Return the reasons by which policies, except Delay, keep `message` waiting; empty for a
    standby message.
    """
    if is_standby(message):
        return []
    return [reason for explain in EXPLAINERS for reason in explain(details, message)]
