"""Explain why a message does not run, and how many messages wait for the policies of a queue.

Short reads in one snapshot, none of which counts a complete queue. Of a queue with policies, at
most 1 000 due messages and 1 000 later ones are read, and each is explained as if alone. So
both always report the same.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Column, Connection, and_, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.policies.standby import has_standby_flags
from faststream_sqlbroker.core.policies.throttle import Throttle
from faststream_sqlbroker.core.policy_waits import (
    MAX_SCANNED,
    MessageWait,
    PoliciedQueue,
    count_waits,
)
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import (
    ORDERED_MODE,
    Explanation,
    Reason,
    WaitingMessage,
    format_error,
    format_timestamp,
    group_by_mode,
)
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.explain.live_messages import COLUMNS, LiveMessage
from faststream_sqlbroker.database.explain.policy_waits import (
    PolicyDetails,
    explain_delay,
    explain_policies,
)
from faststream_sqlbroker.database.parts.claimed_rows import READ_ERRORS, REQUIRED_TIMES
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
    """Reads explanations; each operation is one transaction with one snapshot, and writes nothing.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = database.tables

    def _build_rows(self, connection: Connection, queue: str) -> PolicyRows:
        return PolicyRows(self._database.dialect, connection, queue)

    async def explain(self, message_id: int) -> Explanation:
        """Explain why a message is not running, or how the message ended.

        A row that another program has filled with invalid values is explained too: as what the next
        claim makes of it.
        """
        table = self._tables.message
        condition = table.c.id == message_id

        def explain(connection: Connection) -> Explanation:
            """Read the message and the reasons in the same snapshot."""
            _start_snapshot(connection)
            # First the two columns that are always readable, whatever another program has stored in
            # the others.
            head = connection.execute(select(table.c.state, table.c.queue).where(condition)).first()
            if head is None:
                return self._explain_ended(connection, message_id)
            row, invalid = _read_row(connection, [table.c[name] for name in COLUMNS], condition)
            if row is None:
                description = (
                    "its row holds values that no message can have, such as a count that is not "
                    "a number; the next claim rejects it"
                )
                reasons = [Reason("undecodable", description)]
            else:
                reasons = [*_explain_invalid_times(invalid), *self._list_reasons(connection, row)]
            return Explanation(message_id, MessageState[head.state], head.queue, tuple(reasons))

        return await self._database.run(explain, Activity.OPERATE, write=False)

    def _list_reasons(self, connection: Connection, row: Any) -> list[Reason]:
        """Return the reasons of a live message, by the subscribers and policies of its queue.

        Crashed subscribers are read too: they may hold the lease of the message.
        """
        subscribers = read_subscribers(connection, self._tables.policy_state, ended=True)
        live_subscribers = [
            subscriber
            for subscriber in subscribers
            if subscriber.lease_expires_at > row.now and row.queue in subscriber.queues
        ]
        details = PolicyDetails(self._build_rows(connection, row.queue), row.now, live_subscribers)
        return LiveMessage(details, subscribers, row).list_reasons()

    def _explain_ended(self, connection: Connection, message_id: int) -> Explanation:
        """Explain a message that is not live: how it ended, or that it is unknown.

        By its row in the archive, if there is an archive and the message was archived.
        """
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
            statement = select(*columns, clock().label("now")).where(archive.c.id == message_id)
            row = connection.execute(statement).first()
        if row is None:
            description = (
                "no message with this id is live or archived: it was never published, was not "
                "archived, or was removed from the archive"
            )
            return Explanation(message_id, None, None, (Reason("not_found", description),))
        description = f"it ended as {row.state} at {format_timestamp(row.archived_at, row.now)}"
        description += _format_reason(row) + format_error(row.last_error)
        reasons = [Reason("archived", description, message_id=row.related_id)]
        reasons += self._explain_started(connection, row.queue, message_id, row.now)
        return Explanation(message_id, MessageState[row.state], row.queue, tuple(reasons))

    def _explain_started(
        self, connection: Connection, queue: str, message_id: int, now: datetime
    ) -> list[Reason]:
        """Explain the start of a message that ACK_FIRST removed.

        With this option, a message is removed before its handler starts. A row of the policy state
        then says who started it, until the end is reported. Without such a row, returns no reason.
        """
        table = self._tables.policy_state
        condition = and_(table.c.scope == ACK_FIRST + queue, table.c.key == str(message_id))
        row = connection.execute(
            select(table.c.info, table.c.created_at, table.c.lease_expires_at).where(condition)
        ).first()
        if row is None:
            return []
        worker = str((row.info or {}).get("worker"))
        since = format_timestamp(row.created_at, now)
        if row.lease_expires_at > now:
            description = (
                f"ACK_FIRST removed it, and {worker} started its handler at {since}; its outcome "
                "becomes unknown unless that process reports that it is alive before "
                f"{format_timestamp(row.lease_expires_at, now)}"
            )
            return [Reason("processing", description, until=row.lease_expires_at, worker=worker)]
        description = (
            f"ACK_FIRST removed it; {worker} started its handler at {since} and never reported "
            "that it ended"
        )
        return [Reason("unknown_outcome", description, worker=worker)]

    async def list_policied_queues(
        self, queue: str | None, after: str | None, limit: int
    ) -> list[PoliciedQueue]:
        """Count the messages that wait for the policies of up to `limit` queues, by name.

        Args:
            queue: Only this queue.
            after: Only queues with a greater name.
            limit: 1 or more.
        """

        def load(connection: Connection) -> list[PoliciedQueue]:
            """Count the queues that have a policy or ordered=True, in a single snapshot."""
            _start_snapshot(connection)
            now = connection.execute(select(clock())).scalar_one()
            subscribers = read_subscribers(connection, self._tables.policy_state)
            policied = {
                name
                for subscriber in subscribers
                if subscriber.policies or subscriber.ordered
                for name in subscriber.queues
            }
            names = [
                name
                for name in sorted(policied)
                if (queue is None or name == queue) and (after is None or name > after)
            ]
            queues: list[PoliciedQueue] = []
            for name in names[:limit]:
                alive = [subscriber for subscriber in subscribers if name in subscriber.queues]
                details = PolicyDetails(self._build_rows(connection, name), now, alive)
                queues.append(_QueueCounter(details).count())
            return queues

        return await self._database.run(load, Activity.OPERATE, write=False)


class _QueueCounter:
    """Counts the waiting messages of a queue in the snapshot."""

    def __init__(self, details: PolicyDetails) -> None:
        self._details = details
        self._connection = details.connection
        self._dialect = details.dialect

    def count(self) -> PoliciedQueue:
        """Count the waiting messages of the queue, by the first reason for which each waits.

        Reads a limited number of messages; a count that reached the limit is marked as capped.
        """
        pairs = self._dialect.find_ready_pairs(self._connection, [self._details.queue])
        priorities = [pair.priority for pair in pairs]
        due, due_capped = self._load_messages("due", priorities)
        delayed, delayed_capped = self._load_messages("later", priorities)
        self._details.expect_messages([*due, *delayed])
        waits = count_waits(
            [*self._iter_due_reasons(due), *self._iter_delayed_reasons(delayed)],
            self._details.list_policies(Throttle),
            due_capped=due_capped,
            later_capped=delayed_capped,
        )
        return PoliciedQueue(
            queue=self._details.queue,
            at=self._details.now,
            ways=tuple(sorted(group_by_mode(self._details.queue, self._details.subscribers))),
            subscribers=len(self._details.subscribers),
            due=len(due),
            due_capped=due_capped,
            waits=waits,
        )

    def _load_messages(
        self, kind: str, priorities: Sequence[int]
    ) -> tuple[list[WaitingMessage], bool]:
        """Return the first messages in the order of claims, and True if there are more.

        `kind` is "due", or "later" for messages that become due later.
        """
        rows: list[Any] = []
        for priority in priorities:
            size = MAX_SCANNED + 1 - len(rows)
            if size < 1:
                break
            binds = {
                "queue": self._details.queue,
                "priority": priority,
                "now": to_microseconds(self._details.now),
                "size": size,
            }
            statement = self._dialect.sql[f"policy_waits_{kind}"]
            # A standby message does not count: another message is delivered in its place, and that
            # one counts.
            rows += [
                row for row in self._connection.execute(statement, binds) if not _is_standby(row)
            ]
        messages = [self._to_message(row) for row in rows[:MAX_SCANNED] if _is_readable(row)]
        return messages, len(rows) > MAX_SCANNED

    def _to_message(self, row: Any) -> WaitingMessage:
        """Convert a row of the statements `policy_waits_…`."""
        return WaitingMessage(
            id=row[0],
            queue=self._details.queue,
            key=as_key(row[1]),
            state=MessageState[row[3]],
            attempts_count=row[6],
            deliveries_count=row[7],
            next_attempt_at=from_microseconds(row[2]),
            expired=bool(row[4]),
            policy_marks=row[5],
            now=self._details.now,
        )

    def _iter_due_reasons(self, due: Sequence[WaitingMessage]) -> Iterator[MessageWait]:
        """Yield the first reason of each due message that the order or a policy holds back.

        Due messages without a reason only wait for a worker.
        """
        blocked = self._find_blocked(due) if self._details.is_ordered else set()
        for message in due:
            if message.expired:
                continue  # the next claim discards it, whatever the policies say
            if message.id in blocked:
                yield Reason("behind_earlier_message", "", policy=ORDERED_MODE), message
                continue
            for reason in explain_policies(self._details, message)[:1]:
                yield reason, message

    def _iter_delayed_reasons(self, delayed: Sequence[WaitingMessage]) -> Iterator[MessageWait]:
        """Yield the reasons of messages that a policy has put off.

        Other messages that become due later wait for their delay or retry, not for a policy. A
        reason counts only if it explains the due time of the message, or if the key is held by
        another message.
        """
        for message in delayed:
            if message.expired or not message.policy_marks:
                continue
            reasons = explain_delay(self._details, message) or [
                reason
                for reason in explain_policies(self._details, message)
                if reason.until == message.next_attempt_at or reason.code == "key_held"
            ]
            for reason in reasons[:1]:
                yield reason, message

    def _find_blocked(self, due: Sequence[WaitingMessage]) -> set[int]:
        """Return the messages that wait for an earlier or a leased message of their key.

        For queues with ordered=True, which handles one message of a key at a time. Reads the first
        message of each key in one statement.
        """
        keys = {message.key for message in due if message.key is not None}
        binds = {
            "rows": json.dumps([{"k": key} for key in sorted(keys)]),
            "queue": self._details.queue,
        }
        rows = self._connection.execute(self._dialect.sql["policy_firsts"], binds)
        firsts = {as_key(key): first for key, first in rows if first is not None}

        def is_blocked(message: WaitingMessage) -> bool:
            """Return True if an earlier message of the key waits, or any of them is leased."""
            key = message.key
            return key is not None and (
                firsts.get(key, message.id) < message.id or bool(self._details.load_leases(key))
            )

        return {message.id for message in due if is_blocked(message)}


def _is_readable(row: Sequence[Any]) -> bool:
    # SQLite may have values other than numbers here, until the next claim corrects or rejects them.
    return all(isinstance(row[column], int) for column in (2, 5, 6, 7))


def _is_standby(row: Sequence[Any]) -> bool:
    return _is_readable(row) and has_standby_flags(row[2], row[5])


def _read_row(
    connection: Connection, columns: Sequence[Column[Any]], condition: Any
) -> tuple[Any, list[str]]:
    """Return the row with `now`, and the names of columns with an invalid time.

    Another program may have stored any value. Invalid times have the value that a claim would set:
    now if the time is required, else None. Returns no row if another column is invalid: a claim
    would reject the message.
    """
    invalid: list[str] = []
    try:
        result = connection.execute(select(*columns, clock().label("now")).where(condition))
        values = dict(result.mappings().one())
    except READ_ERRORS:
        values, invalid = _read_columns(connection, columns, condition)
    # MySQL's drivers read a zero date as None.
    invalid += [name for name in REQUIRED_TIMES if values[name] is None and name not in invalid]
    times = {column.name for column in columns if isinstance(column.type, UtcTimestamp)}
    if not times.issuperset(invalid) or not _has_counts(values):
        return None, invalid
    values |= {name: values["now"] for name in REQUIRED_TIMES if name in invalid}
    return SimpleNamespace(**values), invalid


def _read_columns(
    connection: Connection, columns: Sequence[Column[Any]], condition: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the values with `now`, each read alone, and the names of unreadable columns.

    Used if the row cannot be read as a whole: the driver fails at a value that its column should
    not hold. Unreadable values are None.
    """
    values: dict[str, Any] = {"now": connection.execute(select(clock())).scalar_one()}
    unreadable: list[str] = []
    for column in columns:
        try:
            values[column.name] = connection.execute(select(column).where(condition)).scalar_one()
        except READ_ERRORS:
            values[column.name] = None
            unreadable.append(column.name)
    return values, unreadable


def _has_counts(values: Mapping[str, Any]) -> bool:
    return all(isinstance(values[name], int) for name in ("attempts_count", "deliveries_count"))


def _explain_invalid_times(names: Sequence[str]) -> list[Reason]:
    """Explain the columns `names`, in which another program has stored an invalid time."""
    if not names:
        return []
    due = ", so it is due now" if "next_attempt_at" in names else ""
    description = (
        f"another program stored an invalid time in its {' and '.join(names)}{due}; the next "
        "claim corrects this and logs a warning"
    )
    return [Reason("unusable_time", description)]


def _start_snapshot(connection: Connection) -> None:
    """Start a read-only snapshot on `connection`, which has not read yet.

    All reads of an explanation then see one moment: reasons that contradict each other would
    confuse.
    """
    driver: Any = connection.connection.driver_connection
    # A listener of the application may have started a transaction already. In SQLite every
    # transaction is a snapshot, so that is enough.
    if connection.dialect.name == "sqlite" and driver.in_transaction:
        return
    for statement in _SNAPSHOT[connection.dialect.name]:
        connection.exec_driver_sql(statement)


def _format_reason(row: Any) -> str:
    about = "" if row.related_id is None else f" (message {row.related_id})"
    return "" if row.reason is None else f": {row.reason}{about}"
