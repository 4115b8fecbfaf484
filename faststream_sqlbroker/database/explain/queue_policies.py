"""How many messages wait for the policies of a queue: short reads in one snapshot.

At most 1 000 due messages and 1 000 later ones of a queue are read, and each is asked what
`explain` would say of it. So both always tell the same.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from faststream_sqlbroker.core.policies.standby import stands_by
from faststream_sqlbroker.core.policy_waits import MOST_LOOKED_AT, PoliciedQueue, count_waits
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import (
    ORDERED_WAY,
    LiveSubscriber,
    Reason,
    WaitingMessage,
    by_way,
)
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.explain.facts import PolicyFacts
from faststream_sqlbroker.database.explain.message import begin_snapshot
from faststream_sqlbroker.database.explain.policies import delay
from faststream_sqlbroker.database.explain.policy_reasons import policy_reasons
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.policies.rows import as_key
from faststream_sqlbroker.schema.types import clock


def policied_queues(
    connection: Connection, dialect: Dialect, queue: str | None, after: str | None, limit: int
) -> list[PoliciedQueue]:
    """Up to `limit` queues whose live subscribers have policies, by name.

    All reads see one snapshot. The transaction of `connection` must not have read before.

    Args:
        connection: Of a transaction of its own.
        dialect: Its dialect.
        queue: Only this one.
        after: Only those with a greater name.
        limit: 1 or more.
    """
    begin_snapshot(connection)
    now = connection.execute(select(clock())).scalar_one()
    subscribers = read_subscribers(connection, dialect.tables.policy_state)
    policied = sorted({name for s in subscribers if s.policies or s.ordered for name in s.queues})
    wanted = [
        name
        for name in policied
        if (queue is None or name == queue) and (after is None or name > after)
    ]
    return [
        _QueueWaits(connection, dialect, name, now, subscribers).read() for name in wanted[:limit]
    ]


class _QueueWaits:
    """One queue at the moment of the snapshot."""

    def __init__(
        self,
        connection: Connection,
        dialect: Dialect,
        queue: str,
        now: datetime,
        subscribers: Sequence[LiveSubscriber],
    ) -> None:
        self._connection = connection
        self._dialect = dialect
        self._queue = queue
        self._now = now
        self._alive = [s for s in subscribers if queue in s.queues]
        self._facts = PolicyFacts(connection, dialect, queue, now, self._alive)

    def read(self) -> PoliciedQueue:
        """Count what waits."""
        pairs = self._dialect.ready_pairs(self._connection, [self._queue])
        priorities = [pair.priority for pair in pairs]
        due, due_capped = self._messages("due", priorities)
        later, later_capped = self._messages("later", priorities)
        self._facts.expect(message.key for message in (*due, *later))
        waits = count_waits(
            [*self._due_reasons(due), *self._later_reasons(later)],
            due_capped=due_capped,
            later_capped=later_capped,
        )
        return PoliciedQueue(
            queue=self._queue,
            at=self._now,
            ways=tuple(sorted(by_way(self._queue, self._alive))),
            subscribers=len(self._alive),
            due=len(due),
            due_capped=due_capped,
            waits=waits,
        )

    def _messages(self, which: str, priorities: Sequence[int]) -> tuple[list[WaitingMessage], bool]:
        """The first of them in the order of claims, and whether there are more."""
        rows: list[Any] = []
        for priority in priorities:
            size = MOST_LOOKED_AT + 1 - len(rows)
            if size < 1:
                break
            binds = {
                "queue": self._queue,
                "priority": priority,
                "now": to_microseconds(self._now),
                "size": size,
            }
            statement = self._dialect.sql[f"policy_waits_{which}"]
            # Another message is delivered in the place of what stands by: that one counts.
            rows += [
                row for row in self._connection.execute(statement, binds) if not _stands_by(row)
            ]
        read = [self._message(row) for row in rows[:MOST_LOOKED_AT] if _is_read(row)]
        return read, len(rows) > MOST_LOOKED_AT

    def _message(self, row: Any) -> WaitingMessage:
        return WaitingMessage(
            id=row[0],
            queue=self._queue,
            key=as_key(row[1]),
            state=MessageState[row[3]],
            attempts_count=row[6],
            deliveries_count=row[7],
            next_attempt_at=from_microseconds(row[2]),
            expired=bool(row[4]),
            policy_marks=row[5],
            now=self._now,
        )

    def _due_reasons(self, due: Sequence[WaitingMessage]) -> Iterator[tuple[Reason, bool]]:
        behind = self._behind(due) if self._facts.ordered else set()
        for message in due:
            if message.expired:
                continue  # the next claim discards it, whatever the policies say
            if message.id in behind:
                yield Reason("behind_earlier_message", "", policy=ORDERED_WAY), True
                continue
            for reason in policy_reasons(self._facts, message)[:1]:
                yield reason, True

    def _later_reasons(self, later: Sequence[WaitingMessage]) -> Iterator[tuple[Reason, bool]]:
        """Of messages that a policy has put off; others are not due by themselves."""
        for message in later:
            if message.expired or not message.policy_marks:
                continue
            found = delay(self._facts, message) or [
                reason
                for reason in policy_reasons(self._facts, message)
                if reason.until == message.next_attempt_at or reason.code == "key_held"
            ]
            for reason in found[:1]:
                yield reason, False

    def _behind(self, due: Sequence[WaitingMessage]) -> set[int]:
        """Those that an earlier message of their key, or a leased one, keeps waiting."""
        keys = {message.key for message in due if message.key is not None}
        binds = {"rows": json.dumps([{"k": key} for key in sorted(keys)]), "queue": self._queue}
        found = self._connection.execute(self._dialect.sql["policy_firsts"], binds)
        firsts = {as_key(key): first for key, first in found if first is not None}

        def waits(message: WaitingMessage) -> bool:
            key = message.key
            return key is not None and (
                firsts.get(key, message.id) < message.id or bool(self._facts.leases(key))
            )

        return {message.id for message in due if waits(message)}


def _is_read(row: Sequence[Any]) -> bool:
    # SQLite may hold other values than numbers, until the next claim corrects or rejects them.
    return all(isinstance(row[column], int) for column in (2, 5, 6, 7))


def _stands_by(row: Sequence[Any]) -> bool:
    return _is_read(row) and stands_by(row[2], row[5])
