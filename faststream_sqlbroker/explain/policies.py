"""Why each policy makes a message wait. All functions only read, in the snapshot of `explain`."""

import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from uuid import UUID

from sqlalchemy import Connection, select

from faststream_sqlbroker.core.policies import Window
from faststream_sqlbroker.core.policies.debounce import Bursts
from faststream_sqlbroker.core.policies.flags import BURST, SLOT
from faststream_sqlbroker.core.policies.throttle import next_known
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import LiveSubscriber, Reason, WaitingMessage, moment_text
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.dialects.base import Dialect
from faststream_sqlbroker.dialects.policy_state import ONCE
from faststream_sqlbroker.policies.intake import burst_scope, slot_scope
from faststream_sqlbroker.policies.rows import PolicyRows

_CONCURRENCY = re.compile(r"Concurrency\((\d+)(, per_key=True)?\)")

Subscribers = Sequence[LiveSubscriber]


def window(
    _c: Connection, _d: Dialect, message: WaitingMessage, subscribers: Subscribers
) -> list[Reason]:
    """Whether every live subscriber is outside of its window."""
    now = to_microseconds(message.now)
    spans = []
    for subscriber in subscribers:
        windows = [
            found for text in subscriber.policies if (found := Window.read(text)) is not None
        ]
        spans.append([(w, w.span(now)[0]) for w in windows if w.span(now)[0] > now])
    if not spans or not all(spans):
        return []
    closed, opens = min((max(closed, key=lambda c: c[1]) for closed in spans), key=lambda c: c[1])
    until = from_microseconds(opens)
    words = f"it is outside of {closed}, which opens at {moment_text(until, message.now)}"
    return [Reason("outside_window", words, until=until)]


def burst(
    connection: Connection, dialect: Dialect, message: WaitingMessage, subscribers: Subscribers
) -> list[Reason]:
    """Whether its burst goes on, or another message of its key comes first."""
    if (
        message.key is None
        or not message.policy_marks & BURST
        or not _policies(subscribers, "Debounce(")
    ):
        return []
    rows = PolicyRows(dialect)
    states = rows.states(connection, burst_scope(message.queue), [message.key])
    bursts = Bursts.load(states.get(message.key))
    live = rows.live(connection, message.queue, bursts.known())
    turn = bursts.next(set(live))
    if turn is not None and turn != message.id and turn in live:
        name = _holder(connection, dialect, turn, subscribers)
        doing = f"{name} has it" if name else f"it is {live[turn].state}"
        words = (
            f"message {turn} of its key comes first, and its burst waits until that message has "
            f"settled: {doing}"
        )
        return [Reason("key_held", words, message_id=turn, worker=name)]
    if message.id == bursts.newest and message.next_attempt_at > message.now:
        words = (
            "it is the newest message of a burst of its key, which ends at "
            f"{moment_text(message.next_attempt_at, message.now)} if no other comes"
        )
        return [Reason("in_burst", words, until=message.next_attempt_at)]
    return []


def slot(
    connection: Connection, dialect: Dialect, message: WaitingMessage, subscribers: Subscribers
) -> list[Reason]:
    """Whether there is no slot for it yet."""
    if message.policy_marks & SLOT and message.next_attempt_at > message.now:
        at = moment_text(message.next_attempt_at, message.now)
        return [Reason("throttled", f"its slot is at {at}", until=message.next_attempt_at)]
    found = []
    for number, text in _numbered(subscribers, "Throttle("):
        state = (
            PolicyRows(dialect).states(connection, slot_scope(message.queue, number), [""]).get("")
        )
        at_next = next_known(state)
        if at_next is not None and at_next > to_microseconds(message.now):
            until = from_microseconds(at_next)
            words = f"every slot of {text} is taken until {moment_text(until, message.now)}"
            found.append(Reason("throttled", words, until=until))
    return found


def concurrency(
    connection: Connection, dialect: Dialect, message: WaitingMessage, subscribers: Subscribers
) -> list[Reason]:
    """Whether as many messages are leased as may be."""
    found = []
    for text in sorted(_policies(subscribers, "Concurrency(")):
        match = _CONCURRENCY.fullmatch(text)
        if match is None:
            continue
        limit = int(match[1])
        per_key = match[2] is not None
        leased = _leased(connection, dialect, message, limit, per_key=per_key)
        if len(leased) >= limit and not (per_key and message.key is None):
            first, token = leased[0]
            name = next((s.worker for s in subscribers if s.holds(token)), None)
            whose = "its key" if per_key else "the queue"
            holder = name or "a subscriber that is not listed"
            words = (
                f"{limit} of {limit} leases of {whose} are taken ({text}): "
                f"message {first} is held by {holder}"
            )
            found.append(
                Reason(
                    "key_held" if per_key else "concurrency", words, message_id=first, worker=name
                )
            )
    return found


def once(
    connection: Connection, dialect: Dialect, message: WaitingMessage, subscribers: Subscribers
) -> list[Reason]:
    """Whether its key has been claimed already."""
    if message.key is None or not _policies(subscribers, "Once("):
        return []
    table = dialect.tables.policy_state
    of_key = table.c.scope == ONCE + message.queue, table.c.key == message.key
    state = connection.execute(
        select(table.c.info, table.c.created_at).where(*of_key)
    ).one_or_none()
    if state is None:
        return []
    ends = state.created_at + timedelta(seconds=state.info["ttl"])
    started_here = (
        state.info["message"] == message.id and message.deliveries_count > message.attempts_count
    )
    if ends <= message.now and not started_here:
        return []
    other = state.info["message"]
    until = moment_text(ends, message.now)
    if other == message.id:
        words = (
            "its handler was started before, and it is not known how far it got: "
            "the next claim makes the message FAILED"
        )
        return [Reason("unknown_outcome", words)]
    words = (
        f"its key was claimed by message {other}, until {until}: "
        "the next claim discards it as a duplicate"
    )
    return [Reason("duplicate", words, message_id=other)]


def _policies(subscribers: Iterable[LiveSubscriber], begin: str) -> set[str]:
    return {
        text for subscriber in subscribers for text in subscriber.policies if text.startswith(begin)
    }


def _numbered(subscribers: Iterable[LiveSubscriber], begin: str) -> list[tuple[int, str]]:
    """With their numbers among their like, by which their states are stored."""
    listed = [[text for text in s.policies if text.startswith(begin)] for s in subscribers]
    return sorted({found for texts in listed for found in enumerate(texts)})


def _leased(
    connection: Connection,
    dialect: Dialect,
    message: WaitingMessage,
    limit: int,
    *,
    per_key: bool,
) -> list[tuple[int, UUID]]:
    c = dialect.tables.message.c
    statement = select(c.id, c.lease_token).where(
        c.queue == message.queue,
        c.state == MessageState.PROCESSING.name,
        c.lease_expires_at.is_not(None),
    )
    if per_key:
        statement = statement.where(c.key == message.key)
    return [
        (row.id, row.lease_token)
        for row in connection.execute(statement.order_by(c.id).limit(limit))
    ]


def _holder(
    connection: Connection, dialect: Dialect, message_id: int, subscribers: Subscribers
) -> str | None:
    c = dialect.tables.message.c
    token = connection.execute(select(c.lease_token).where(c.id == message_id)).scalar_one_or_none()
    return next((s.worker for s in subscribers if s.holds(token)), None)
