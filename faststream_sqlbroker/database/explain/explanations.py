"""Why a message does not run, and how many wait for the policies of a queue.

Short reads in one snapshot, none of which counts a whole queue. Of a queue with policies at most
1 000 due messages and 1 000 later ones are read, and each is asked what its own explanation would
say. So both always tell the same.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Column, Connection, and_, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.policies.standby import stands_by
from faststream_sqlbroker.core.policies.throttle import Throttle
from faststream_sqlbroker.core.policy_waits import (
    MOST_LOOKED_AT,
    PoliciedQueue,
    Wait,
    count_waits,
)
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import (
    ORDERED_WAY,
    Explanation,
    Reason,
    WaitingMessage,
    by_way,
    error_text,
    moment_text,
)
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.explain.live import COLUMNS, LiveMessage
from faststream_sqlbroker.database.explain.policies import PolicyFacts, delay, policy_reasons
from faststream_sqlbroker.database.parts.claimed_rows import NEEDED_TIMES, UNREADABLE
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.policy_state import ACK_FIRST
from faststream_sqlbroker.database.policies.rows import PolicyRows, as_key
from faststream_sqlbroker.schema.types import MYSQL, UtcTimestamp, clock

_SNAPSHOT: dict[str, tuple[str, ...]] = {
    "postgresql": ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",),
    "sqlite": ("BEGIN",),
    **dict.fromkeys(
        MYSQL,
        (
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
            "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
        ),
    ),
}


class Explanations:
    """Reads them; each operation is one transaction, which sees one snapshot and writes nothing.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = database.tables

    def _rows(self, connection: Connection, queue: str) -> PolicyRows:
        return PolicyRows(self._database.dialect, connection, queue)

    async def explain(self, message_id: int) -> Explanation:
        """Why a message is not running, or how it ended."""
        table = self._tables.message
        of_id = table.c.id == message_id

        def explain(connection: Connection) -> Explanation:
            _begin_snapshot(connection)
            # First the two columns that are always readable, whatever another program has stored
            # elsewhere.
            head = connection.execute(select(table.c.state, table.c.queue).where(of_id)).first()
            if head is None:
                return self._ended(connection, message_id)
            row, wrong = _read(connection, [table.c[name] for name in COLUMNS], of_id)
            if row is None:
                words = (
                    "its row holds what no message can have, such as a count that is not a "
                    "number: the next claim rejects it"
                )
                reasons = [Reason("undecodable", words)]
            else:
                reasons = [*_unusable(wrong), *self._reasons(connection, row)]
            return Explanation(message_id, MessageState[head.state], head.queue, tuple(reasons))

        return await self._database.run(explain, Activity.OPERATE, write=False)

    def _reasons(self, connection: Connection, row: Any) -> list[Reason]:
        known = read_subscribers(connection, self._tables.policy_state, ended=True)
        alive = [s for s in known if s.lease_expires_at > row.now and row.queue in s.queues]
        facts = PolicyFacts(self._rows(connection, row.queue), row.now, alive)
        return LiveMessage(facts, known, row).reasons()

    def _ended(self, connection: Connection, message_id: int) -> Explanation:
        archive = self._tables.archive
        row = None
        if archive is not None:
            columns = (
                archive.c.state,
                archive.c.queue,
                archive.c.archived_at,
                archive.c.reason,
                archive.c.related_id,
                archive.c.last_error,
            )
            found = select(*columns, clock().label("now")).where(archive.c.id == message_id)
            row = connection.execute(found).first()
        if row is None:
            words = (
                "no message with this id is live or archived: it was never published, not kept in "
                "the archive, or removed from it"
            )
            return Explanation(message_id, None, None, (Reason("not_found", words),))
        words = f"it ended as {row.state} at {moment_text(row.archived_at, row.now)}"
        words += _why(row) + error_text(row.last_error)
        reasons = [Reason("archived", words, message_id=row.related_id)]
        reasons += self._started(connection, row.queue, message_id, row.now)
        return Explanation(message_id, MessageState[row.state], row.queue, tuple(reasons))

    def _started(
        self, connection: Connection, queue: str, message_id: int, now: datetime
    ) -> list[Reason]:
        """What is known of the start of a message that ACK_FIRST removed."""
        table = self._tables.policy_state
        of = and_(table.c.scope == ACK_FIRST + queue, table.c.key == str(message_id))
        row = connection.execute(
            select(table.c.info, table.c.created_at, table.c.lease_expires_at).where(of)
        ).first()
        if row is None:
            return []
        worker = str((row.info or {}).get("worker"))
        since = moment_text(row.created_at, now)
        if row.lease_expires_at > now:
            words = (
                f"ACK_FIRST removed it, and {worker} began its handler {since}; its outcome is "
                "unknown if that process gives no sign of life until "
                f"{moment_text(row.lease_expires_at, now)}"
            )
            return [Reason("processing", words, until=row.lease_expires_at, worker=worker)]
        words = (
            f"ACK_FIRST removed it, {worker} started its handler {since} and was not heard of again"
        )
        return [Reason("unknown_outcome", words, worker=worker)]

    async def policied_queues(
        self, queue: str | None, after: str | None, limit: int
    ) -> list[PoliciedQueue]:
        """How many messages wait for the policies of up to `limit` queues, by name.

        Args:
            queue: Only this one.
            after: Only those with a greater name.
            limit: 1 or more.
        """

        def read(connection: Connection) -> list[PoliciedQueue]:
            _begin_snapshot(connection)
            now = connection.execute(select(clock())).scalar_one()
            subscribers = read_subscribers(connection, self._tables.policy_state)
            policied = {name for s in subscribers if s.policies or s.ordered for name in s.queues}
            wanted = [
                name
                for name in sorted(policied)
                if (queue is None or name == queue) and (after is None or name > after)
            ]
            found: list[PoliciedQueue] = []
            for name in wanted[:limit]:
                alive = [s for s in subscribers if name in s.queues]
                facts = PolicyFacts(self._rows(connection, name), now, alive)
                found.append(_QueueWaits(facts).read())
            return found

        return await self._database.run(read, Activity.OPERATE, write=False)


class _QueueWaits:
    """One queue at the moment of the snapshot."""

    def __init__(self, facts: PolicyFacts) -> None:
        """That of `facts`."""
        self._facts = facts
        self._connection = facts.connection
        self._dialect = facts.dialect

    def read(self) -> PoliciedQueue:
        """Count what waits."""
        pairs = self._dialect.ready_pairs(self._connection, [self._facts.queue])
        priorities = [pair.priority for pair in pairs]
        due, due_capped = self._messages("due", priorities)
        later, later_capped = self._messages("later", priorities)
        self._facts.expect(message.key for message in (*due, *later))
        waits = count_waits(
            [*self._due_reasons(due), *self._later_reasons(later)],
            self._facts.policies(Throttle),
            due_capped=due_capped,
            later_capped=later_capped,
        )
        return PoliciedQueue(
            queue=self._facts.queue,
            at=self._facts.now,
            ways=tuple(sorted(by_way(self._facts.queue, self._facts.subscribers))),
            subscribers=len(self._facts.subscribers),
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
                "queue": self._facts.queue,
                "priority": priority,
                "now": to_microseconds(self._facts.now),
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
            queue=self._facts.queue,
            key=as_key(row[1]),
            state=MessageState[row[3]],
            attempts_count=row[6],
            deliveries_count=row[7],
            next_attempt_at=from_microseconds(row[2]),
            expired=bool(row[4]),
            policy_marks=row[5],
            now=self._facts.now,
        )

    def _due_reasons(self, due: Sequence[WaitingMessage]) -> Iterator[Wait]:
        behind = self._behind(due) if self._facts.ordered else set()
        for message in due:
            if message.expired:
                continue  # the next claim discards it, whatever the policies say
            if message.id in behind:
                yield Reason("behind_earlier_message", "", policy=ORDERED_WAY), message
                continue
            for reason in policy_reasons(self._facts, message)[:1]:
                yield reason, message

    def _later_reasons(self, later: Sequence[WaitingMessage]) -> Iterator[Wait]:
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
                yield reason, message

    def _behind(self, due: Sequence[WaitingMessage]) -> set[int]:
        """Those that an earlier message of their key, or a leased one, keeps waiting."""
        keys = {message.key for message in due if message.key is not None}
        binds = {
            "rows": json.dumps([{"k": key} for key in sorted(keys)]),
            "queue": self._facts.queue,
        }
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


def _read(
    connection: Connection, columns: Sequence[Column[Any]], of_id: Any
) -> tuple[Any, list[str]]:
    """The row with `now`, and the names of its columns that hold an invalid time.

    Invalid times have the value that a claim would give them. No row if another column is invalid.
    """
    wrong: list[str] = []
    try:
        found = connection.execute(select(*columns, clock().label("now")).where(of_id))
        values = dict(found.mappings().one())
    except UNREADABLE:
        values, wrong = _read_singly(connection, columns, of_id)
    # MySQL's drivers read a zero date as None.
    wrong += [name for name in NEEDED_TIMES if values[name] is None and name not in wrong]
    times = {column.name for column in columns if isinstance(column.type, UtcTimestamp)}
    if not times.issuperset(wrong) or not _has_counts(values):
        return None, wrong
    values |= {name: values["now"] for name in NEEDED_TIMES if name in wrong}
    return SimpleNamespace(**values), wrong


def _read_singly(
    connection: Connection, columns: Sequence[Column[Any]], of_id: Any
) -> tuple[dict[str, Any], list[str]]:
    """The values with `now`, each read by itself, and the names of those that cannot be read; they
    are None.
    """
    values: dict[str, Any] = {"now": connection.execute(select(clock())).scalar_one()}
    unreadable: list[str] = []
    for column in columns:
        try:
            values[column.name] = connection.execute(select(column).where(of_id)).scalar_one()
        except UNREADABLE:
            values[column.name] = None
            unreadable.append(column.name)
    return values, unreadable


def _has_counts(values: Mapping[str, Any]) -> bool:
    return all(isinstance(values[name], int) for name in ("attempts_count", "deliveries_count"))


def _unusable(names: Sequence[str]) -> list[Reason]:
    if not names:
        return []
    due = ": it is due now" if "next_attempt_at" in names else ""
    words = (
        f"its {' and '.join(names)} is no time, as another program has written it{due}; the next "
        "claim puts that right, with a warning"
    )
    return [Reason("unusable_time", words)]


def _begin_snapshot(connection: Connection) -> None:
    """From now on `connection`, which has not read yet, reads one snapshot and writes nothing."""
    driver: Any = connection.connection.driver_connection
    # A listener of the application may have begun already. In SQLite every transaction is a
    # snapshot, so that is enough.
    if connection.dialect.name == "sqlite" and driver.in_transaction:
        return
    for statement in _SNAPSHOT[connection.dialect.name]:
        connection.exec_driver_sql(statement)


def _why(row: Any) -> str:
    about = "" if row.related_id is None else f" (message {row.related_id})"
    return "" if row.reason is None else f": {row.reason}{about}"
