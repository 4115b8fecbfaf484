"""Which messages stand by (`core.policies.standby`), as a condition of a statement."""

from sqlalchemy import ColumnElement, Table, and_

from faststream_sqlbroker.core.policies.flags import HELD_BURST
from faststream_sqlbroker.core.policies.standby import STANDBY
from faststream_sqlbroker.core.times import from_microseconds


def standing(table: Table) -> ColumnElement[bool]:
    """Whether a message of `table` stands by."""
    c = table.c
    marked = c.policy_marks.op("&")(HELD_BURST) > 0
    return and_(c.next_attempt_at >= from_microseconds(STANDBY), marked)
