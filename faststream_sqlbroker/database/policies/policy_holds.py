"""Free messages that wait for a policy that no live subscriber of their queue has any more.

Messages that wait because the database's clock was set back are freed, too.

Delay, bursts and throttles that refuse give messages a later due time. That time is obsolete
when a deployment has removed the policy. Claims note now and then which policies may have put
messages off; the flags of a message say which policy has set its due time.

A note that is more than a minute later than now proves that the database's clock was set back,
and by about how much. Until the clock reaches that time again, due times given before are
obsolete, too.

The notes are rows of the policy state: the scope is `HOLDS` and the queue, the key names the
policy.

Times are microseconds since 1970.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, and_, delete, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.argument_checks import CLOCK_STEP
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST, HELD_DELAY, POSTPONED
from faststream_sqlbroker.core.policies.holds import (
    build_holds,
    compute_release_time,
    get_hold_flag,
)
from faststream_sqlbroker.core.policies.standby import STANDBY, has_standby_flags
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.database.policies.intake import HOLDS, NOTE_RETENTION
from faststream_sqlbroker.database.policies.key_heads import MAX_BURST_WAIT
from faststream_sqlbroker.database.policies.rows import DelayedMessage, PolicyRows, read_now
from faststream_sqlbroker.schema.types import clock

NOTE_VALIDITY = 60 * 1_000_000
"""Microseconds after a note for which its policy counts as present although no subscriber reports
it: its heartbeat may have failed.
"""
STEP_SIZE = 2_000
"""Messages that one transaction checks."""
STEP_OVERLAP = 1_000
"""Microseconds by which a step overlaps the one before: other messages may have the same due time.
"""


@dataclass
class FreeProgress:
    """The progress and the results of a search."""

    at: dict[int, int] = field(default_factory=dict)
    """By priority, the due time after which messages have not been checked."""
    size: int = STEP_SIZE
    back: int = 0
    """Microseconds by which the database's clock was set back."""
    freed: int = 0
    done: bool = False


class Hold(NamedTuple):
    """A policy that has put messages off."""

    queue: str
    name: str
    info: dict[str, Any]
    now: datetime
    """Time of the read, by the database's clock."""

    @property
    def seen(self) -> int:
        """Time of the last note by a claim (microseconds since 1970)."""
        return int(self.info.get("seen", 0))

    @property
    def is_ahead(self) -> bool:
        """True if the database's clock was set back after the note."""
        return self.seen > to_microseconds(self.now) + CLOCK_STEP


class PolicyHolds(StoreSubject):
    """Reads the notes and frees waiting messages; each operation is a transaction or several
    steps.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    async def load_holds(self, queues: Sequence[str]) -> list[Hold]:
        """Return the policies that may have put messages of `queues` off, by queue and name.

        Claims note such policies in the policy state. A note whose policy is gone from all
        subscribers says that its messages must be freed.
        """

        def load(connection: Connection) -> list[Hold]:
            """Read the notes of all `queues`, some scopes at a time."""
            return [
                _to_hold(row)
                for scopes in iter_chunks([HOLDS + queue for queue in queues])
                for row in connection.execute(self._build_select(scopes))
            ]

        return await self._database.run(load, Activity.CONSUME, Activity.STATE, write=False)

    def _build_select(self, scopes: Sequence[str]) -> Select[Any]:
        """Select the notes of `scopes`, by scope and name, with the database's time."""
        c = self._table.c
        statement = select(c.scope, c.key, c.info, clock().label("now"))
        return statement.where(c.scope.in_(scopes)).order_by(c.scope, c.key)

    async def find_removed(self, holds: Sequence[Hold]) -> list[Hold]:
        """Return the `holds` whose policy no live subscriber has any more.

        A hold that a claim has noted lately counts as present: its subscriber may just not have
        written a heartbeat yet. Only for older holds are the registrations of subscribers read.
        """
        old_holds = [
            hold for hold in holds if hold.seen + NOTE_VALIDITY < to_microseconds(hold.now)
        ]
        if not old_holds:
            return []
        live_policies = await self._database.run(
            self._load_live_policies, Activity.CONSUME, Activity.STATE, write=False
        )
        return [
            hold
            for hold in old_holds
            if hold.name not in build_holds(live_policies.get(hold.queue, ()))
        ]

    def _load_live_policies(self, connection: Connection) -> dict[str, list[Policy]]:
        """Return the policies of claiming subscribers by queue.

        A stopping subscriber claims no more, so its policies do not count.
        """
        policies: dict[str, list[Policy]] = {}
        for subscriber in read_subscribers(connection, self._table):
            if not subscriber.stopping:
                for queue in subscriber.queues:
                    policies.setdefault(queue, []).extend(subscriber.rules)
        return policies

    async def free_removed(self, hold: Hold) -> int | None:
        """Free the messages that wait for a removed policy; return their number.

        A deployment may remove a policy while messages wait for it: without this, they would wait
        until their old due time. A freed message is due now, or by the Delay that a live subscriber
        has instead. Does nothing if a subscriber has the policy again. None means that a claim of
        the queue is running: try again.
        """
        flag = get_hold_flag(hold.name)
        # If the policy returns, the message takes part again.
        cleared_flags = flag | BURST if flag == HELD_BURST else flag
        note_condition = and_(
            self._table.c.scope == HOLDS + hold.queue, self._table.c.key == hold.name
        )

        def free(connection: Connection, search: FreeProgress) -> FreeProgress:
            """Free the next messages, and remove the note after the last."""
            live_policies = self._load_live_policies(connection).get(hold.queue, [])
            if hold.name in build_holds(live_policies):
                return replace(search, done=True)
            now = read_now(self._dialect, connection, self._database.clock).now

            def compute_due(row: DelayedMessage) -> int | None:
                """Return the due time without the policy; None if set by another policy."""
                if not row.flags & flag:
                    return None
                return compute_release_time(hold.name, hold.info, live_policies, row.due, now)

            progress = self._shift_delayed(
                connection, hold.queue, search, now, compute_due, ~cleared_flags
            )
            if progress.done:
                connection.execute(delete(self._table).where(note_condition))
            return progress

        progress = await self._run_in_steps(hold.queue, free)
        return None if progress is None else progress.freed

    async def repair_clock_step(self, queue: str) -> FreeProgress | None:
        """Correct due times that policies of `queue` gave before the database's clock was set back.

        They would be too late by as much as the clock was set back. Does nothing if the step was
        repaired already; repeating it, as after a crash, changes nothing more. None means that a
        claim of the queue is running: try again.
        """

        def repair(connection: Connection, search: FreeProgress) -> FreeProgress:
            """Move back the next due times, and correct the notes after the last."""
            now = read_now(self._dialect, connection, self._database.clock).now
            holds = [
                _to_hold(row) for row in connection.execute(self._build_select([HOLDS + queue]))
            ]
            back = max((hold.seen - now for hold in holds), default=0)
            if back <= CLOCK_STEP:
                return replace(search, done=True)
            max_wait = max(MAX_BURST_WAIT, *(int(hold.info.get("length", 0)) for hold in holds))

            def compute_due(row: DelayedMessage) -> int | None:
                """Return the corrected due time; None if it can be right by the current clock."""
                if row.flags & POSTPONED:
                    return now  # a throttle can be checked at any time
                # For a standby message, this is the time of its next check.
                base = STANDBY if has_standby_flags(row.due, row.flags) else 0
                # With the current clock, no policy puts a message off for so long.
                is_late = row.due - base - max_wait > now + CLOCK_STEP
                is_late = is_late and bool(row.flags & (HELD_BURST | HELD_DELAY))
                return max(base + now, row.due - back) if is_late else None

            progress = self._shift_delayed(connection, queue, search, now, compute_due, ~0)
            progress.back = max(search.back, back)
            if progress.done:
                notes = {
                    hold.name: ({**hold.info, "seen": min(hold.seen, now)}, now + NOTE_RETENTION)
                    for hold in holds
                }
                PolicyRows(self._dialect, connection, queue).save_states(HOLDS + queue, notes)
            return progress

        return await self._run_in_steps(queue, repair)

    async def _run_in_steps(
        self, queue: str, step: Callable[[Connection, FreeProgress], FreeProgress]
    ) -> FreeProgress | None:
        """Run `step` repeatedly under the claim lock of `queue`, each time from the last position.

        Each step is a transaction of limited length. The lock keeps claims from changing the same
        messages. Returns None if a claim is running: it is not waited for, and the caller tries
        again later.
        """
        search = FreeProgress()

        def run_locked(connection: Connection) -> FreeProgress | None:
            is_free = self._dialect.lock_order(connection, [queue])
            return step(connection, search) if is_free else None

        while True:
            progress = await self._database.run(run_locked, Activity.CONSUME, Activity.STATE)
            if progress is None or progress.done:
                return progress
            search = progress

    def _shift_delayed(
        self,
        connection: Connection,
        queue: str,
        search: FreeProgress,
        now: int,
        compute_due: Callable[[DelayedMessage], int | None],
        retained_flags: int,
    ) -> FreeProgress:
        """Set due times of messages that are due later than `now`; return the new progress.

        One step of a search: reads the next page of each priority. `compute_due` returns None for
        messages that stay unchanged. Flags except `retained_flags` are cleared.
        """
        progress = replace(search, at=dict(search.at), done=True)
        rows = PolicyRows(self._dialect, connection, queue)
        for pair in self._dialect.find_ready_pairs(connection, [queue]):
            checked_until = progress.at.setdefault(pair.priority, now)
            messages = rows.list_delayed(pair.priority, now=checked_until, size=search.size)
            due = {
                row.id: timestamp for row in messages if (timestamp := compute_due(row)) is not None
            }
            rows.shift(due, 0, retained_flags)
            progress.freed += len(due)
            if len(messages) == search.size:
                progress.done = False
                # PostgreSQL 13 returns times of standby messages as a double: some microseconds
                # off.
                if messages[-1].due - STEP_OVERLAP > checked_until:
                    progress.at[pair.priority] = messages[-1].due - STEP_OVERLAP
                else:
                    progress.size *= 2  # so many have the same due time
        return progress


def _to_hold(row: Any) -> Hold:
    return Hold(row.scope.removeprefix(HOLDS), row.key, row.info or {}, row.now)
