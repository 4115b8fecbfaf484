"""Registrations of live subscribers and pauses of queues, stored in the policy state.

The statements are the same on every database.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, Table, and_, bindparam, func, or_, select

from faststream_sqlbroker.core.orders import CancelRequest, OperatorRequests
from faststream_sqlbroker.core.status import LiveSubscriber, PausedQueue, parse_subscriber
from faststream_sqlbroker.database.parts import cancel_requests
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.schema.types import clock, later

SUBSCRIBER = "subscriber"
"""Scope of registrations; the key is the subscriber's name."""
PAUSED = "paused"
"""Scope of pauses; the key is the queue."""
STATE_CHANGED = " "
"""Sent to listeners when a queue is paused or resumed, a subscriber is drained or undrained, a
running message is to be cancelled, or a schedule is redefined. No queue can have this name."""

RETENTION_SECONDS = 3600
"""Seconds for which the registration of a crashed subscriber is stored after its lease has
expired, so that `explain` can name the holder of its messages.
"""
MAX_SUBSCRIBERS = 10_000
"""Maximum registrations that are read, the first by name."""

Descriptions = Mapping[str, Mapping[str, Any]]
"""The description of each subscriber by its name."""


def renew_registrations(
    connection: Connection,
    table: Table,
    descriptions: Descriptions,
    changed: set[str],
    lease: float,
) -> None:
    """Renew the registrations of the subscribers in `descriptions` for `lease` seconds from now.

    Each heartbeat of a process calls this. A registration says that a subscriber lives, and
    describes its options for other processes. The description is rewritten only for names in
    `changed`.
    """
    expiries = {
        "lease_expires_at": later(bindparam("lease")),
        "expires_at": later(bindparam("kept")),
    }
    times = {
        "lease": round(lease * 1_000_000),
        "kept": round((lease + RETENTION_SECONDS) * 1_000_000),
    }
    for names, replaced in (
        (sorted(changed), (*expiries, "info")),
        (sorted(descriptions.keys() - changed), tuple(expiries)),
    ):
        binds = [
            {"scope": SUBSCRIBER, "key": name, "info": dict(descriptions[name]), **times}
            for name in names
        ]
        if binds:
            upsert(connection, table, binds, replaced=replaced, created_at=clock(), **expiries)


def read_subscribers(
    connection: Connection, table: Table, *, ended: bool = False
) -> list[LiveSubscriber]:
    """Return live subscribers, with `ended` also crashed subscribers, the latest heartbeat first.

    A subscriber is live while the lease of its registration, which its heartbeats renew, has not
    run out. A crashed subscriber stays listed for an hour.
    """
    statement = select_registrations(table)
    if not ended:
        statement = statement.where(table.c.lease_expires_at > clock())
    # In the order of the primary key: leases have no index, so ordering by them would read and sort
    # all rows.
    rows = connection.execute(statement.order_by(table.c.key).limit(MAX_SUBSCRIBERS))
    subscribers = [read_subscriber(row) for row in rows]
    return sorted(subscribers, key=lambda subscriber: subscriber.lease_expires_at, reverse=True)


def select_registrations(table: Table, *columns: Any) -> Select[Any]:
    """Select the columns of `read_subscriber`, with `columns` added."""
    # The counter of a registration says whether an operator has drained it. Heartbeats do not
    # change it, and it is removed with the row.
    c = table.c
    registration = (c.key, c.info, c.created_at, c.lease_expires_at, c.counter)
    return select(*registration, *columns).where(c.scope == SUBSCRIBER)


def read_subscriber(row: Any) -> LiveSubscriber:
    """Convert a row of `select_registrations`."""
    return parse_subscriber(
        row.key, row.info or {}, row.created_at, row.lease_expires_at, drained=row.counter > 0
    )


def select_pauses(table: Table) -> Select[Any]:
    """Select the active pauses by queue; `read_pause` converts the rows."""
    c = table.c
    statement = select(c.key, c.created_at, c.expires_at, c.info)
    return statement.where(c.scope == PAUSED, match_active(table)).order_by(c.key)


def read_pause(row: Any) -> PausedQueue:
    """Convert a row of `select_pauses`."""
    info: Mapping[str, Any] = row.info or {}
    by = str(info.get("by", "an operator"))
    return PausedQueue(row.key, row.created_at, row.expires_at, by, info.get("reason"))


def load_orders(
    connection: Connection, table: Table, local_names: Sequence[str] = ()
) -> OperatorRequests:
    """Return the orders of operators for the fleet, and for the subscribers `local_names`.

    These are pauses of queues, requests to cancel running messages, and drains. Each heartbeat
    reads all of them in one statement.
    """
    c = table.c
    condition = or_(
        and_(c.scope == PAUSED, match_active(table)),
        c.scope == cancel_requests.CANCEL,
        and_(c.scope == SUBSCRIBER, c.key.in_(sorted(local_names)), c.counter > 0),
    )
    names: dict[str, set[str]] = {PAUSED: set(), SUBSCRIBER: set()}
    requests: list[CancelRequest] = []
    for row in connection.execute(select(c.scope, c.key, c.info).where(condition)):
        if row.scope == cancel_requests.CANCEL:
            requests.append(cancel_requests.parse_request(row.key, row.info))
        else:
            names[row.scope].add(row.key)
    return OperatorRequests(frozenset(names[PAUSED]), tuple(requests), frozenset(names[SUBSCRIBER]))


def notify_state_changed(connection: Connection, channel: str) -> None:
    """Notify listeners at commit that pauses, drains or schedules have changed (PostgreSQL)."""
    connection.execute(select(func.pg_notify(channel, STATE_CHANGED)))


def match_pause(table: Table, queue: Any) -> Any:
    """Return the condition of the pause of `queue`, a name or a bind."""
    return and_(table.c.scope == PAUSED, table.c.key == queue)


def match_active(table: Table) -> Any:
    """Return the condition that a row has not expired."""
    return or_(table.c.expires_at.is_(None), table.c.expires_at > clock())
