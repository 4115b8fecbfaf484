"""From which due time on messages stand by (`core.policies.standby`), in the SQL of a database."""

from sqlalchemy import ColumnElement, Table, and_

from faststream_sqlbroker.core.policies.flags import HELD_BURST
from faststream_sqlbroker.core.policies.standby import STANDBY
from faststream_sqlbroker.core.times import from_microseconds


def standby_time(database: str) -> str:
    """A literal of `database`."""
    if database == "sqlite":
        return str(STANDBY)
    moment = f"{from_microseconds(STANDBY):%Y-%m-%d %H:%M:%S}"
    return f"'{moment}+00'" if database == "postgresql" else f"'{moment}'"


def standing(table: Table) -> ColumnElement[bool]:
    """Whether a message of `table` stands by."""
    c = table.c
    marked = c.policy_marks.op("&")(HELD_BURST) > 0
    return and_(c.next_attempt_at >= from_microseconds(STANDBY), marked)
