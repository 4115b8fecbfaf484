"""Which policies have put messages of a queue off: what waits for one that is gone must be freed.

Rows of the policy state: the scope is `HOLDS` and the queue, the key says what puts off.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, and_, delete, select

from faststream_sqlbroker.core.policies.options import CLOCK_STEP
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import clock

HOLDS = "holds:"
KEPT = 365 * 86_400 * 1_000_000
"""A note that a policy puts messages off is kept for a year after a process wrote it."""


class Hold(NamedTuple):
    """A policy that has put messages off."""

    queue: str
    name: str
    info: dict[str, Any]
    now: datetime
    """When it was read, by the database's clock."""

    @property
    def seen(self) -> int:
        """When a claim last noted it (microseconds since 1970)."""
        return int(self.info.get("seen", 0))

    @property
    def ahead(self) -> bool:
        """Whether the database's clock was set back since."""
        return self.seen > to_microseconds(self.now) + CLOCK_STEP


def read_holds(connection: Connection, table: Table, queues: Sequence[str]) -> list[Hold]:
    """Those of `queues`, by queue and name."""
    c = table.c
    found: list[Hold] = []
    for part in chunks([HOLDS + queue for queue in queues]):
        statement = select(c.scope, c.key, c.info, clock().label("now")).where(c.scope.in_(part))
        found += [
            Hold(row.scope.removeprefix(HOLDS), row.key, row.info or {}, row.now)
            for row in connection.execute(statement.order_by(c.scope, c.key))
        ]
    return found


def forget_hold(connection: Connection, table: Table, hold: Hold) -> None:
    """Nothing waits for this policy any more."""
    one = and_(table.c.scope == HOLDS + hold.queue, table.c.key == hold.name)
    connection.execute(delete(table).where(one))
