"""The rights that the broker's statements need.

docs/howto/security.md lists them. Tests run with roles that have these rights and no others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Table

from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import MYSQL


class AllColumnsExcept(frozenset[str]):
    """All columns of a table except the named columns."""


ALL_COLUMNS = AllColumnsExcept()
HIDDEN = ("payload", "headers")
"""The columns of a message for which an operator needs a separate right."""
LEASE = ("lease_token", "lease_expires_at")
FIXED = ("id", "origin_id", "created_at", "expires_at")
"""The columns of a live message that never change."""
SETTLE_COLUMNS = AllColumnsExcept([*FIXED, "priority"])
"""The columns that claims and outcomes change."""
EDIT_COLUMNS = AllColumnsExcept(
    [*FIXED, *HIDDEN, *LEASE, "acquired_at", "publish_count", "policy_key"]
)
"""The columns that operators change."""
RELEASE_COLUMNS = ("state", "acquired_at", *LEASE, "policy_marks")
"""The columns that change when a lease is taken from its worker."""
PUBLISH_COLUMNS = (
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
"""The columns that a publish writes, in the order of their values in the dialects' `insert_row`."""
COUNT_COLUMNS = ("queue", "priority", "state", "next_attempt_at", "id", "claimable")
MIRROR_COLUMNS = ("scope", "key", "info", "expires_at", "counter")


@dataclass(frozen=True, slots=True)
class Right:
    """A kind of statement on a table."""

    table: Table
    verb: str
    """SELECT, INSERT, UPDATE or DELETE; or USAGE, of the sequence of the table's ids."""
    columns: tuple[str, ...]
    """The columns that must be allowed; empty for DELETE and USAGE."""
    is_table_wide: bool
    """True if a GRANT should name the table rather than columns."""
    activities: Activities


class RequiredRight(NamedTuple):
    """A right that an activity needs."""

    table: str
    """The attribute of `Tables`."""
    verb: str
    columns: Sequence[str] | AllColumnsExcept = ALL_COLUMNS
    by_column: bool = False
    """True if a GRANT lists the columns, although `columns` is an `AllColumnsExcept`."""


POSTGRESQL_PUBLISH_RIGHTS = (
    # A statement of several messages draws their ids itself.
    RequiredRight("message", "INSERT", ("id",)),
    RequiredRight("message", "USAGE", ()),
    # RETURNING reads the id; ON CONFLICT the columns of its index.
    RequiredRight("message", "SELECT", ("id", "queue", "dedup_id")),
)
_SCHEDULE = tuple(RequiredRight("policy_state", verb) for verb in ("SELECT", "INSERT", "UPDATE"))
_STATE = (*_SCHEDULE, RequiredRight("policy_state", "DELETE", ()))
_READ = RequiredRight("message", "SELECT")
_DELETED = RequiredRight("message", "DELETE", ())
_ARCHIVE = RequiredRight("archive", "INSERT")
_REQUIRED_RIGHTS: Mapping[Activity, Sequence[RequiredRight]] = {
    Activity.PUBLISH: (RequiredRight("message", "INSERT", PUBLISH_COLUMNS),),
    Activity.MIRROR: (RequiredRight("policy_state", "INSERT", MIRROR_COLUMNS),),
    Activity.COUNT: (RequiredRight("message", "SELECT", COUNT_COLUMNS),),
    Activity.CONSUME: (_READ, RequiredRight("message", "UPDATE", SETTLE_COLUMNS), _DELETED),
    # A direct claim reads the paused queues and the input of correlation ids. A subscriber's claim
    # does not, because its heartbeat reads them.
    Activity.TAKE: (RequiredRight("policy_state", "SELECT"),),
    # A request registers the queue of its replies in the policy state.
    Activity.REQUEST: (_READ, _DELETED, *_STATE),
    Activity.ARCHIVE: (_ARCHIVE,),
    Activity.STATE: _STATE,
    Activity.SCHEDULE: _SCHEDULE,
    Activity.LOCK: _SCHEDULE,
    Activity.OPERATE: (
        RequiredRight("message", "SELECT", AllColumnsExcept(HIDDEN), by_column=True),
        RequiredRight("archive", "SELECT", AllColumnsExcept(HIDDEN), by_column=True),
        *_STATE,
    ),
    Activity.INSPECT: (
        RequiredRight("message", "SELECT", HIDDEN),
        RequiredRight("archive", "SELECT", HIDDEN),
    ),
    # A message that is cancelled is copied whole into the archive.
    Activity.REPAIR: (
        _READ,
        RequiredRight("message", "UPDATE", EDIT_COLUMNS, by_column=True),
        _DELETED,
        _ARCHIVE,
    ),
    Activity.REDRIVE: (
        RequiredRight("message", "INSERT", AllColumnsExcept(LEASE)),
        RequiredRight("archive", "SELECT"),
        RequiredRight("archive", "DELETE", ()),
        # Rows are locked first, for which PostgreSQL requires the UPDATE right.
        RequiredRight("archive", "UPDATE", ("id",)),
    ),
    Activity.PRUNE: (
        RequiredRight("archive", "SELECT", ("id", "state", "archived_at")),
        RequiredRight("archive", "DELETE", ()),
    ),
    Activity.RELEASE: (
        RequiredRight("message", "SELECT", ("id", "queue", *RELEASE_COLUMNS, "attempts_count")),
        RequiredRight("message", "UPDATE", RELEASE_COLUMNS),
    ),
}


def list_required_rights(tables: Tables, dialect: Any, activities: Activities) -> list[Right]:
    """List the rights that the statements of `activities` need, merged by table and verb.

    `AccessChecks` tries each on no rows, to find the rights that the database user lacks.

    Args:
        tables: The broker's tables.
        dialect: SQLAlchemy's dialect of a connection.
        activities: The purposes for which the process uses the database.
    """
    merged: dict[tuple[Table, str], Right] = {}
    for activity in sorted(activities, key=lambda activity: activity.name):
        required_rights = _REQUIRED_RIGHTS[activity]
        if activity is Activity.PUBLISH and dialect.name == "postgresql":
            required_rights = (*required_rights, *POSTGRESQL_PUBLISH_RIGHTS)
        for required in required_rights:
            table: Table | None = getattr(tables, required.table)
            if table is None:
                continue
            activity_set = frozenset({activity})
            is_table_wide = (
                isinstance(required.columns, AllColumnsExcept) and not required.by_column
            )
            merged_right = merged.get(
                (table, required.verb), Right(table, required.verb, (), is_table_wide, activity_set)
            )
            merged[table, required.verb] = Right(
                table,
                required.verb,
                tuple(
                    dict.fromkeys(
                        (*merged_right.columns, *_list_columns(required, table, dialect.name))
                    )
                ),
                merged_right.is_table_wide or is_table_wide,
                merged_right.activities | activity_set,
            )
    return list(merged.values())


def _list_columns(required: RequiredRight, table: Table, database: str) -> Sequence[str]:
    """Return the columns of `table` that `required` names, or all except the excluded columns.

    `claimable` is a generated column that only MySQL and MariaDB have, for the index of waiting
    messages. SQLAlchemy's table does not list it.
    """
    claimable = ["claimable"] if required.table == "message" and database in MYSQL else []
    if not isinstance(required.columns, AllColumnsExcept):
        return [name for name in required.columns if name != "claimable" or claimable]
    names = [name for name in table.columns.keys() if name not in required.columns]  # noqa: SIM118
    return [*names, *claimable] if required.verb == "SELECT" else names
