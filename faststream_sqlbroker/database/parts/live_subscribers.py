"""Registrations of live subscribers and pauses of queues: rows of the policy state.

The statements are the same on every database.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, and_, bindparam, delete, func, null, or_, select, update

from faststream_sqlbroker.core.orders import CancelRequest, Orders
from faststream_sqlbroker.core.status import LiveSubscriber, PausedQueue, subscriber_of
from faststream_sqlbroker.database.parts import cancels
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.schema.types import clock, later

SUBSCRIBER = "subscriber"
"""Scope of registrations; the key is the subscriber's name."""
PAUSED = "paused"
"""Scope of pauses; the key is the queue."""
STATE_CHANGED = " "
"""Sent to listeners when a queue is paused or resumed, a subscriber is drained or undrained, a
running message is to be cancelled, or a schedule is redefined. No queue can have this name."""

KEPT_SECONDS = 3600
"""How long the registration of a crashed subscriber is kept after its lease has run out, so that
`explain` can name the holder of its messages."""
MOST_READ = 10_000
"""Registrations that are read at most, the first by name."""
_CLEANED = 100
"""Rows of a scope that one heartbeat removes at most, so that it stays short."""

Known = Mapping[str, Mapping[str, Any]]
"""Each subscriber's description of itself, by its name."""


def announce(
    connection: Connection, table: Table, known: Known, changed: set[str], lease: float
) -> None:
    """Renew the registrations of the subscribers `known` for `lease` seconds from now.

    The description is rewritten only for those in `changed`.
    """
    ends = {
        "lease_expires_at": later(bindparam("lease")),
        "expires_at": later(bindparam("kept")),
    }
    times = {"lease": _micros(lease), "kept": _micros(lease + KEPT_SECONDS)}
    for names, replaced in (
        (sorted(changed), (*ends, "info")),
        (sorted(known.keys() - changed), tuple(ends)),
    ):
        binds = [
            {"scope": SUBSCRIBER, "key": name, "info": dict(known[name]), **times} for name in names
        ]
        if binds:
            upsert(connection, table, binds, replaced=replaced, created_at=clock(), **ends)


def leave(connection: Connection, table: Table, names: Sequence[str]) -> None:
    """Remove the registrations of these subscribers."""
    one = and_(table.c.scope == SUBSCRIBER, table.c.key == bindparam("name"))
    connection.execute(delete(table).where(one), [{"name": name} for name in names])


def clean(connection: Connection, table: Table) -> None:
    """Remove some of the pauses that are over, and of the subscribers that ended long ago."""
    over = table.c.expires_at < clock()
    for scope in (PAUSED, SUBSCRIBER):
        old = select(table.c.key).where(table.c.scope == scope, over).limit(_CLEANED)
        if keys := connection.execute(old).scalars().all():
            # One by one, by the primary key. For a list of keys MariaDB may scan the table, and
            # would wait for rows that another transaction has locked.
            one = and_(table.c.scope == scope, table.c.key == bindparam("name"), over)
            connection.execute(delete(table).where(one), [{"name": key} for key in keys])


def read_subscribers(
    connection: Connection, table: Table, *, ended: bool = False
) -> list[LiveSubscriber]:
    """The live subscribers, with `ended` also crashed ones; the latest heartbeat first."""
    statement = select(*_shown(table)).where(table.c.scope == SUBSCRIBER)
    if not ended:
        statement = statement.where(table.c.lease_expires_at > clock())
    # Along the primary key: leases have no index, so an order by them would read and sort all.
    rows = connection.execute(statement.order_by(table.c.key).limit(MOST_READ))
    found = [_subscriber(row) for row in rows]
    return sorted(found, key=lambda each: each.lease_expires_at, reverse=True)


def subscribed_queues(
    connection: Connection, table: Table, after: str, limit: int
) -> tuple[set[str], str | None]:
    """The queues of the first `limit` live subscribers behind `after`, by name; the last of these
    subscribers, or None if none is left.
    """
    c = table.c
    # Along the primary key: leases have no index, so an order by them would read all each time.
    page = select(c.key, c.info).where(c.scope == SUBSCRIBER, c.key > after)
    living = page.where(c.lease_expires_at > clock()).order_by(c.key).limit(limit)
    rows = connection.execute(living).all()
    queues = {queue for row in rows for queue in (row.info or {}).get("queues", ())}
    return queues, rows[-1].key if len(rows) == limit else None


def read_subscriber(
    connection: Connection, table: Table, name: str
) -> tuple[LiveSubscriber, bool] | None:
    """The subscriber of this name, and whether it is alive; None if it is not known."""
    lives = (table.c.lease_expires_at > clock()).label("lives")
    statement = select(*_shown(table), lives)
    row = connection.execute(
        statement.where(table.c.scope == SUBSCRIBER, table.c.key == name)
    ).first()
    return None if row is None else (_subscriber(row), bool(row.lives))


def drain(connection: Connection, table: Table, names: Sequence[str], *, drained: bool) -> set[str]:
    """Drain these live subscribers, or end that; the names of those that changed."""
    c = table.c
    changed = set[str]()
    # One by one in one order, as signs of life lock the same rows.
    for name in sorted(names):
        one = (c.scope == SUBSCRIBER, c.key == name, c.lease_expires_at > clock())
        statement = update(table).where(*one, c.counter == int(not drained))
        if connection.execute(statement.values(counter=int(drained))).rowcount:
            changed.add(name)
    return changed


def drained_names(connection: Connection, table: Table, limit: int) -> list[str]:
    """The names of the first `limit` live subscribers that are drained."""
    c = table.c
    drained = select(c.key).where(c.scope == SUBSCRIBER, c.counter > 0)
    living = drained.where(c.lease_expires_at > clock()).order_by(c.key).limit(limit)
    return list(connection.execute(living).scalars())


def _shown(table: Table) -> tuple[Any, ...]:
    # The counter of a registration says whether an operator has drained it: signs of life leave it
    # as it is, and it goes with the row.
    c = table.c
    return c.key, c.info, c.created_at, c.lease_expires_at, c.counter


def _subscriber(row: Any) -> LiveSubscriber:
    return subscriber_of(
        row.key, row.info or {}, row.created_at, row.lease_expires_at, drained=row.counter > 0
    )


def pause(
    connection: Connection,
    table: Table,
    queue: str,
    until: datetime | float | None,
    info: Mapping[str, Any],
) -> None:
    """Pause `queue` until a time, for some seconds, or (None) until it is resumed.

    If the queue is paused already, the pause gets the new end and the new reason.
    """
    # A pause that is over may not have been cleaned yet; an upsert would keep its begin.
    connection.execute(delete(table).where(pause_of(table, queue), table.c.expires_at < clock()))
    ends: Any = null() if until is None else until
    if isinstance(until, int | float):
        ends = later(bindparam("until_in"))
    binds: dict[str, Any] = {"scope": PAUSED, "key": queue, "info": dict(info)}
    if isinstance(until, int | float):
        binds["until_in"] = _micros(until)
    upsert(
        connection,
        table,
        [binds],
        replaced=("expires_at", "info"),
        created_at=clock(),
        expires_at=ends,
    )


def resume(connection: Connection, table: Table, queue: str) -> bool:
    """End the pause of `queue`; returns whether there was one."""
    of = pause_of(table, queue)
    # Locked, so that of two operators who resume at once only one is told that there was a pause.
    was = connection.execute(
        select(table.c.key).where(of, is_lasting(table)).with_for_update()
    ).first()
    connection.execute(delete(table).where(of))
    return was is not None


def paused(connection: Connection, table: Table, queue: str | None = None) -> list[PausedQueue]:
    """The queues that are paused now, or this one if it is; by name."""
    statement = select(table.c.key, table.c.created_at, table.c.expires_at, table.c.info)
    statement = statement.where(table.c.scope == PAUSED, is_lasting(table))
    if queue is not None:
        statement = statement.where(table.c.key == queue)
    rows = connection.execute(statement.order_by(table.c.key))
    return [PausedQueue(r.key, r.created_at, r.expires_at, *_words(r.info or {})) for r in rows]


def orders(connection: Connection, table: Table, ours: Sequence[str] = ()) -> Orders:
    """What operators have asked of the fleet, and of the subscribers `ours` of this process."""
    c = table.c
    either = or_(
        and_(c.scope == PAUSED, is_lasting(table)),
        c.scope == cancels.CANCEL,
        and_(c.scope == SUBSCRIBER, c.key.in_(sorted(ours)), c.counter > 0),
    )
    names: dict[str, set[str]] = {PAUSED: set(), SUBSCRIBER: set()}
    requests: list[CancelRequest] = []
    for row in connection.execute(select(c.scope, c.key, c.info).where(either)):
        if row.scope == cancels.CANCEL:
            requests.append(cancels.request_of(row.key, row.info))
        else:
            names[row.scope].add(row.key)
    return Orders(frozenset(names[PAUSED]), tuple(requests), frozenset(names[SUBSCRIBER]))


def paused_names(connection: Connection, table: Table) -> frozenset[str]:
    """The names of the queues that are paused now."""
    statement = select(table.c.key).where(table.c.scope == PAUSED, is_lasting(table))
    return frozenset(connection.execute(statement).scalars())


def notify_state_changed(connection: Connection, channel: str) -> None:
    """Tell listeners, when the transaction is committed, that pauses, drains or schedules have
    changed (PostgreSQL).
    """
    connection.execute(select(func.pg_notify(channel, STATE_CHANGED)))


def pause_of(table: Table, queue: Any) -> Any:
    """The row of a pause of `queue`, a name or a bind."""
    return and_(table.c.scope == PAUSED, table.c.key == queue)


def is_lasting(table: Table) -> Any:
    """Whether a row is not over yet."""
    return or_(table.c.expires_at.is_(None), table.c.expires_at > clock())


def _micros(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _words(info: Mapping[str, Any]) -> tuple[str, str | None]:
    return str(info.get("by", "an operator")), info.get("reason")
