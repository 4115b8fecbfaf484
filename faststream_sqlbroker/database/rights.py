"""Which rights the broker's statements need.

docs/howto/security.md lists them. Tests run with roles that have these rights and no others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table

from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import MYSQL

PUBLISHED = (
    "queue",
    "payload",
    "headers",
    "priority",
    "key",
    "dedup_id",
    "created_at",
    "next_attempt_at",
    "expires_at",
)
"""The columns that a publish writes."""
SETTLED = (
    "queue",
    "key",
    "dedup_id",
    "headers",
    "payload",
    "state",
    "attempts_count",
    "deliveries_count",
    "next_attempt_at",
    "first_attempt_at",
    "last_attempt_at",
    "acquired_at",
    "last_error",
    "lease_token",
    "lease_expires_at",
    "policy_marks",
    "policy_key",
    "publish_count",
    "hops",
)
"""The columns of a live message that claims and outcomes change."""
RELEASED = ("state", "acquired_at", "lease_token", "lease_expires_at", "policy_marks")
"""The columns that change when a lease is taken from its worker."""
REPAIRED = (
    "queue",
    "priority",
    "key",
    "dedup_id",
    "state",
    "attempts_count",
    "deliveries_count",
    "next_attempt_at",
    "first_attempt_at",
    "last_attempt_at",
    "last_error",
    "policy_marks",
    "hops",
)
"""The columns of a message that operators change."""
HIDDEN = ("payload", "headers")
"""The columns of a message that an operator needs a right of its own for."""


@dataclass(frozen=True, slots=True)
class Right:
    """One kind of statement on one table."""

    table: Table
    verb: str
    """SELECT, INSERT, UPDATE or DELETE; or USAGE, of the sequence of the table's ids."""
    columns: tuple[str, ...]
    """The columns that must be allowed; none for DELETE and USAGE."""
    whole: bool
    """Whether a GRANT should name the table rather than columns."""
    activities: Activities


def rights(tables: Tables, dialect: Any, activities: Activities) -> list[Right]:
    """The rights that the statements of `activities` need, one for each table and verb.

    Args:
        tables: The broker's tables.
        dialect: SQLAlchemy's dialect of a connection. A dialect that has never connected does not
            know MariaDB from MySQL.
        activities: What the process does.
    """
    merged: dict[tuple[Table, str], Right] = {}
    for activity in sorted(activities, key=lambda activity: activity.name):
        these = frozenset({activity})
        for table, verb, names, whole in _NEEDS[activity](tables, dialect):
            if table is None:
                continue
            known = merged.get((table, verb), Right(table, verb, (), whole, these))
            columns = dict.fromkeys((*known.columns, *names))
            merged[table, verb] = Right(
                table, verb, tuple(columns), known.whole or whole, known.activities | these
            )
    return list(merged.values())


Need = tuple[Table | None, str, Sequence[str], bool]


def _publish(tables: Tables, dialect: Any) -> Iterator[Need]:
    message = tables.message
    yield message, "INSERT", PUBLISHED, False
    if dialect.name == "postgresql":
        # A statement of several messages draws their ids itself.
        yield message, "INSERT", ("id",), False
        yield message, "USAGE", (), True
        # RETURNING reads the id; ON CONFLICT the columns of its index.
        yield message, "SELECT", ("id", "queue", "dedup_id"), False


def _mirror(tables: Tables, _dialect: Any) -> Iterator[Need]:
    yield tables.policy_state, "INSERT", ("scope", "key", "info", "expires_at", "counter"), False


def _count(tables: Tables, dialect: Any) -> Iterator[Need]:
    claimable = ("claimable",) if dialect.name in MYSQL else ()
    columns = ("queue", "priority", "state", "next_attempt_at", "id", *claimable)
    yield tables.message, "SELECT", columns, False


def _consume(tables: Tables, dialect: Any) -> Iterator[Need]:
    claimable = ("claimable",) if dialect.name in MYSQL else ()
    yield tables.message, "SELECT", (*tables.message.columns.keys(), *claimable), True
    yield tables.message, "UPDATE", SETTLED, True
    yield tables.message, "DELETE", (), True


def _take(tables: Tables, _dialect: Any) -> Iterator[Need]:
    # A direct claim reads which queues are paused, and what correlation ids are made of. A
    # subscriber's claims do not: its heartbeat tells it.
    yield tables.policy_state, "SELECT", ("scope", "key", "expires_at", "info"), True


def _request(tables: Tables, dialect: Any) -> Iterator[Need]:
    claimable = ("claimable",) if dialect.name in MYSQL else ()
    yield tables.message, "SELECT", (*tables.message.columns.keys(), *claimable), True
    yield tables.message, "DELETE", (), True
    # Where it notes the queue of its replies.
    yield from _state(tables, dialect)


def _archive(tables: Tables, _dialect: Any) -> Iterator[Need]:
    columns = () if tables.archive is None else tables.archive.columns.keys()
    yield tables.archive, "INSERT", columns, True


def _schedule(tables: Tables, _dialect: Any) -> Iterator[Need]:
    for verb in ("SELECT", "INSERT", "UPDATE"):
        yield tables.policy_state, verb, tables.policy_state.columns.keys(), True


def _state(tables: Tables, dialect: Any) -> Iterator[Need]:
    yield from _schedule(tables, dialect)
    yield tables.policy_state, "DELETE", (), True


def _operate(tables: Tables, dialect: Any) -> Iterator[Need]:
    claimable = ("claimable",) if dialect.name in MYSQL else ()
    yield tables.message, "SELECT", (*_shown(tables.message), *claimable), False
    yield tables.archive, "SELECT", _shown(tables.archive), False
    yield from _state(tables, dialect)


def _shown(table: Table | None) -> Sequence[str]:
    """What operators see of a message."""
    return () if table is None else [c.name for c in table.columns if c.name not in HIDDEN]


def _inspect(tables: Tables, _dialect: Any) -> Iterator[Need]:
    yield tables.message, "SELECT", HIDDEN, False
    yield tables.archive, "SELECT", HIDDEN, False


def _repair(tables: Tables, dialect: Any) -> Iterator[Need]:
    claimable = ("claimable",) if dialect.name in MYSQL else ()
    # A message that is cancelled is copied whole into the archive.
    yield tables.message, "SELECT", (*tables.message.columns.keys(), *claimable), True
    yield tables.message, "UPDATE", REPAIRED, False
    yield tables.message, "DELETE", (), True
    yield from _archive(tables, dialect)


def _redrive(tables: Tables, _dialect: Any) -> Iterator[Need]:
    message = tables.message
    computed = {"claimable", "lease_token", "lease_expires_at"}
    columns = [c.name for c in message.columns if c.name not in computed]
    yield message, "INSERT", columns, True
    if tables.archive is not None:
        yield tables.archive, "SELECT", tables.archive.columns.keys(), True
        yield tables.archive, "DELETE", (), True
        # Rows are locked first, for which PostgreSQL wants the right to change them.
        yield tables.archive, "UPDATE", ("id",), False


def _prune(tables: Tables, _dialect: Any) -> Iterator[Need]:
    yield tables.archive, "SELECT", ("id", "state", "archived_at"), False
    yield tables.archive, "DELETE", (), True


def _release(tables: Tables, _dialect: Any) -> Iterator[Need]:
    yield tables.message, "SELECT", ("id", "queue", *RELEASED, "attempts_count"), False
    yield tables.message, "UPDATE", RELEASED, False


_NEEDS = {
    Activity.PUBLISH: _publish,
    Activity.MIRROR: _mirror,
    Activity.COUNT: _count,
    Activity.CONSUME: _consume,
    Activity.TAKE: _take,
    Activity.REQUEST: _request,
    Activity.ARCHIVE: _archive,
    Activity.STATE: _state,
    Activity.SCHEDULE: _schedule,
    Activity.LOCK: _schedule,
    Activity.OPERATE: _operate,
    Activity.INSPECT: _inspect,
    Activity.REPAIR: _repair,
    Activity.REDRIVE: _redrive,
    Activity.PRUNE: _prune,
    Activity.RELEASE: _release,
}
