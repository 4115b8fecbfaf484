"""What waited for a policy that no live subscriber of its queue has is freed, and so is what waits
for a clock that was set back.

Delay, bursts and throttles that refuse give messages a later due time. It says nothing any more
when a deployment has taken the policy away. Which policies may have put messages off is noted by
their claims, now and then; the marks of a message say whose its due time is.

A note that is more than a minute later than now proves that the database's clock was set back, and
by about how much. Until the clock has come there again, due times that were given before say
nothing, either.

The notes are rows of the policy state: the scope is `HOLDS` and the queue, the key says what puts
off.

Times are microseconds since 1970.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, and_, delete, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST, HELD_DELAY, PUT_OFF
from faststream_sqlbroker.core.policies.holds import freed_at, holds_of, mark_of
from faststream_sqlbroker.core.policies.options import CLOCK_STEP
from faststream_sqlbroker.core.policies.standby import STANDBY, stands_by
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.database.policies.intake import HOLDS, KEPT
from faststream_sqlbroker.database.policies.key_heads import BURST_WAIT_LIMIT
from faststream_sqlbroker.database.policies.rows import Later, PolicyRows, read_now
from faststream_sqlbroker.schema.types import clock

LIVES = 60 * 1_000_000
"""So long after such a note a policy is not gone (microseconds), though no subscriber tells of it:
its heartbeat may have failed."""
STEP = 2_000
"""Messages that one transaction looks at."""
EARLIER = 1_000
"""A step begins this long before the last due time of the one before (microseconds): others have
the same."""


@dataclass
class Freeing:
    """How far one search has come, and what it has found."""

    at: dict[int, int] = field(default_factory=dict)
    """By priority, the due time after which messages have not been looked at."""
    size: int = STEP
    back: int = 0
    """By how much the database's clock was set back (microseconds)."""
    freed: int = 0
    done: bool = False


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


class PolicyHolds:
    """Reads the notes and frees what waits; each operation is one transaction, or some steps.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def read(self, queues: Sequence[str]) -> list[Hold]:
        """What may have put messages of `queues` off, by queue and name."""

        def read(connection: Connection) -> list[Hold]:
            return [
                _hold(row)
                for scopes in chunks([HOLDS + queue for queue in queues])
                for row in connection.execute(self._select(scopes))
            ]

        return await self._database.run(read, Activity.CONSUME, Activity.STATE, write=False)

    def _select(self, scopes: Sequence[str]) -> Select[Any]:
        c = self._table.c
        statement = select(c.scope, c.key, c.info, clock().label("now"))
        return statement.where(c.scope.in_(scopes)).order_by(c.scope, c.key)

    async def removed(self, holds: Sequence[Hold]) -> list[Hold]:
        """Those of `holds` that no live subscriber has any more."""
        old = [hold for hold in holds if hold.seen + LIVES < to_microseconds(hold.now)]
        if not old:
            return []
        live = await self._database.run(self._live, Activity.CONSUME, Activity.STATE, write=False)
        return [hold for hold in old if hold.name not in holds_of(live.get(hold.queue, ()))]

    def _live(self, connection: Connection) -> dict[str, list[Policy]]:
        """By queue, the policies of subscribers that claim."""
        found: dict[str, list[Policy]] = {}
        for subscriber in read_subscribers(connection, self._table):
            if not subscriber.stopping:
                for queue in subscriber.queues:
                    found.setdefault(queue, []).extend(subscriber.rules)
        return found

    async def free_removed(self, hold: Hold) -> int | None:
        """Free what waits for a policy that is gone; how many messages. None: try again, as a claim
        of the queue runs.

        Nothing is done if a subscriber has the policy again.
        """
        mark = mark_of(hold.name)
        # With the policy back, it takes part anew.
        gone = mark | BURST if mark == HELD_BURST else mark
        note = and_(self._table.c.scope == HOLDS + hold.queue, self._table.c.key == hold.name)

        def free(connection: Connection, search: Freeing) -> Freeing:
            live = self._live(connection).get(hold.queue, [])
            if hold.name in holds_of(live):
                return replace(search, done=True)
            now = read_now(self._dialect, connection, self._database.clock).now

            def due_of(row: Later) -> int | None:
                if not row.marks & mark:
                    return None
                return freed_at(hold.name, hold.info, live, row.due, now)

            found = self._shift(connection, hold.queue, search, now, due_of, ~gone)
            if found.done:
                connection.execute(delete(self._table).where(note))
            return found

        found = await self._in_steps(hold.queue, free)
        return None if found is None else found.freed

    async def mend_clock_step(self, queue: str) -> Freeing | None:
        """Set back what policies of `queue` have put off before the database's clock was. None: try
        again, as a claim of the queue runs.

        Nothing is done if the step was mended. To do it again, as after a crash, changes nothing
        more.
        """

        def mend(connection: Connection, search: Freeing) -> Freeing:
            now = read_now(self._dialect, connection, self._database.clock).now
            holds = [_hold(row) for row in connection.execute(self._select([HOLDS + queue]))]
            back = max((hold.seen - now for hold in holds), default=0)
            if back <= CLOCK_STEP:
                return replace(search, done=True)
            longest = max(BURST_WAIT_LIMIT, *(int(hold.info.get("length", 0)) for hold in holds))

            def due_of(row: Later) -> int | None:
                if row.marks & PUT_OFF:
                    return now  # a throttle may be asked at any time
                # What stands by is to be looked at then.
                base = STANDBY if stands_by(row.due, row.marks) else 0
                # By the clock of today, nothing puts a message off for so long.
                is_late = row.due - base - longest > now + CLOCK_STEP
                is_late = is_late and bool(row.marks & (HELD_BURST | HELD_DELAY))
                return max(base + now, row.due - back) if is_late else None

            found = self._shift(connection, queue, search, now, due_of, ~0)
            found.back = max(search.back, back)
            if found.done:
                notes = {
                    hold.name: ({**hold.info, "seen": min(hold.seen, now)}, now + KEPT)
                    for hold in holds
                }
                PolicyRows(self._dialect, connection, queue).keep(HOLDS + queue, notes)
            return found

        return await self._in_steps(queue, mend)

    async def _in_steps(
        self, queue: str, step: Callable[[Connection, Freeing], Freeing]
    ) -> Freeing | None:
        """Take `step` after `step` under the lock of claims of `queue`, each from where the one
        before has come to; None: a claim runs.
        """
        search = Freeing()

        def locked(connection: Connection) -> Freeing | None:
            is_free = self._dialect.lock_order(connection, [queue])
            return step(connection, search) if is_free else None

        while True:
            found = await self._database.run(locked, Activity.CONSUME, Activity.STATE)
            if found is None or found.done:
                return found
            search = found

    def _shift(
        self,
        connection: Connection,
        queue: str,
        search: Freeing,
        now: int,
        due_of: Callable[[Later], int | None],
        kept: int,
    ) -> Freeing:
        """Give some of what is due later than `now` the due times `due_of` it, unless they are
        None; leave of its marks those `kept`. How far that is.
        """
        found = replace(search, at=dict(search.at), done=True)
        rows = PolicyRows(self._dialect, connection, queue)
        for pair in self._dialect.ready_pairs(connection, [queue]):
            at = found.at.setdefault(pair.priority, now)
            later = rows.later(pair.priority, now=at, size=search.size)
            due = {row.id: moment for row in later if (moment := due_of(row)) is not None}
            rows.shift(due, 0, kept)
            found.freed += len(due)
            if len(later) == search.size:
                found.done = False
                # PostgreSQL 13 tells times of what stands by as a double: some microseconds off.
                if later[-1].due - EARLIER > at:
                    found.at[pair.priority] = later[-1].due - EARLIER
                else:
                    found.size *= 2  # so many have the same due time
        return found


def _hold(row: Any) -> Hold:
    return Hold(row.scope.removeprefix(HOLDS), row.key, row.info or {}, row.now)
