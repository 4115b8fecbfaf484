"""Which rights the broker's statements need.

docs/howto/security.md lists them. Tests run with roles that have these rights and no others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Table

from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import MYSQL


class But(frozenset[str]):
    """Stands for all columns of a table except the named ones."""


ALL = But()
HIDDEN = ("payload", "headers")
"""The columns of a message that an operator needs a right of its own for."""
LEASE = ("lease_token", "lease_expires_at")
FIXED = ("id", "origin_id", "created_at", "expires_at")
"""The columns of a live message that nothing changes."""
SETTLED = But([*FIXED, "priority"])
"""What claims and outcomes change."""
REPAIRED = But([*FIXED, *HIDDEN, *LEASE, "acquired_at", "publish_count", "policy_key"])
"""What operators change."""
RELEASED = ("state", "acquired_at", *LEASE, "policy_marks")
"""What changes when a lease is taken from its worker."""
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
"""What a publish writes; `insert_row` of the dialects has their values, in this order."""
COUNTED = ("queue", "priority", "state", "next_attempt_at", "id", "claimable")
MIRRORED = ("scope", "key", "info", "expires_at", "counter")


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


class Need(NamedTuple):
    """A right of an activity."""

    table: str
    """The attribute of `Tables`."""
    verb: str
    columns: Sequence[str] | But = ALL
    named: bool = False
    """Whether a GRANT names the columns, although they are all `But` some."""


POSTGRESQL_PUBLISHES = (
    # A statement of several messages draws their ids itself.
    Need("message", "INSERT", ("id",)),
    Need("message", "USAGE", ()),
    # RETURNING reads the id; ON CONFLICT the columns of its index.
    Need("message", "SELECT", ("id", "queue", "dedup_id")),
)
_SCHEDULE = tuple(Need("policy_state", verb) for verb in ("SELECT", "INSERT", "UPDATE"))
_STATE = (*_SCHEDULE, Need("policy_state", "DELETE", ()))
_READ = Need("message", "SELECT")
_DELETED = Need("message", "DELETE", ())
_ARCHIVE = Need("archive", "INSERT")
_NEEDS: Mapping[Activity, Sequence[Need]] = {
    Activity.PUBLISH: (Need("message", "INSERT", PUBLISHED),),
    Activity.MIRROR: (Need("policy_state", "INSERT", MIRRORED),),
    Activity.COUNT: (Need("message", "SELECT", COUNTED),),
    Activity.CONSUME: (_READ, Need("message", "UPDATE", SETTLED), _DELETED),
    # A direct claim reads which queues are paused, and what correlation ids are made of. A
    # subscriber's claims do not: its heartbeat tells it.
    Activity.TAKE: (Need("policy_state", "SELECT"),),
    # It notes the queue of its replies among the states.
    Activity.REQUEST: (_READ, _DELETED, *_STATE),
    Activity.ARCHIVE: (_ARCHIVE,),
    Activity.STATE: _STATE,
    Activity.SCHEDULE: _SCHEDULE,
    Activity.LOCK: _SCHEDULE,
    Activity.OPERATE: (
        Need("message", "SELECT", But(HIDDEN), named=True),
        Need("archive", "SELECT", But(HIDDEN), named=True),
        *_STATE,
    ),
    Activity.INSPECT: (Need("message", "SELECT", HIDDEN), Need("archive", "SELECT", HIDDEN)),
    # A message that is cancelled is copied whole into the archive.
    Activity.REPAIR: (_READ, Need("message", "UPDATE", REPAIRED, named=True), _DELETED, _ARCHIVE),
    Activity.REDRIVE: (
        Need("message", "INSERT", But(LEASE)),
        Need("archive", "SELECT"),
        Need("archive", "DELETE", ()),
        # Rows are locked first, for which PostgreSQL wants the right to change them.
        Need("archive", "UPDATE", ("id",)),
    ),
    Activity.PRUNE: (
        Need("archive", "SELECT", ("id", "state", "archived_at")),
        Need("archive", "DELETE", ()),
    ),
    Activity.RELEASE: (
        Need("message", "SELECT", ("id", "queue", *RELEASED, "attempts_count")),
        Need("message", "UPDATE", RELEASED),
    ),
}


def rights(tables: Tables, dialect: Any, activities: Activities) -> list[Right]:
    """The rights that the statements of `activities` need, one for each table and verb.

    Args:
        tables: The broker's tables.
        dialect: SQLAlchemy's dialect of a connection.
        activities: What the process does.
    """
    merged: dict[tuple[Table, str], Right] = {}
    for activity in sorted(activities, key=lambda activity: activity.name):
        needs = _NEEDS[activity]
        if activity is Activity.PUBLISH and dialect.name == "postgresql":
            needs = (*needs, *POSTGRESQL_PUBLISHES)
        for need in needs:
            table: Table | None = getattr(tables, need.table)
            if table is None:
                continue
            these = frozenset({activity})
            whole = isinstance(need.columns, But) and not need.named
            known = merged.get((table, need.verb), Right(table, need.verb, (), whole, these))
            merged[table, need.verb] = Right(
                table,
                need.verb,
                tuple(dict.fromkeys((*known.columns, *_columns(need, table, dialect.name)))),
                known.whole or whole,
                known.activities | these,
            )
    return list(merged.values())


def _columns(need: Need, table: Table, database: str) -> Sequence[str]:
    # What MySQL and MariaDB generate to find messages by.
    claimable = ["claimable"] if need.table == "message" and database in MYSQL else []
    if not isinstance(need.columns, But):
        return [name for name in need.columns if name != "claimable" or claimable]
    names = [name for name in table.columns.keys() if name not in need.columns]  # noqa: SIM118
    return [*names, *claimable] if need.verb == "SELECT" else names
