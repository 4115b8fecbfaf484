"""Readers of PostgreSQL's rows, and SQLSTATEs by their meaning for the broker."""

import json
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.orders import OperatorRequests
from faststream_sqlbroker.core.policies.seen import (
    Candidate,
    CompareAndSwap,
    QueueSnapshot,
    QueueSnapshots,
)
from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ClaimedMessages,
    PollResult,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.database.parts.cancel_requests import parse_request

_DUE = itemgetter(10, 0)
"""Due time (as bytes that sort in time order) and id among `CLAIMED_COLUMNS`."""
_NEGATIVE = 0x80
"""Sign bit of the first byte of a timestamptz as sent: set for times before 2000."""


def read_claimed(rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
    """Convert `CLAIMED_COLUMNS` to messages; values are decoded on first use."""
    create: Any = ClaimedMessage  # of as many values as there are columns
    return [create(*r[:15], token, r[15]) for r in rows]


def read_pairs(rows: Iterable[Sequence[Any]]) -> ReadyPairs:
    """Read pairs, and the time that the server took to find the pairs.

    A pair is a queue and a priority with waiting messages. A row without a queue only has the
    times.
    """
    pairs = ReadyPairs()
    for queue, priority, due_in, due, elapsed, at in rows:
        pairs.duration, pairs.at = max(pairs.duration, elapsed), at
        if queue is not None:
            pairs.append(ReadyPair(queue, priority, due_in, due))
    return pairs


def read_around(rows: Iterable[Sequence[Any]]) -> PollResult:
    """Read the answer to a poll: pairs, the first lease end, and the requests of operators.

    A pair is a queue and a priority with waiting messages. The rest is repeated in each row.
    Requests (pauses, cancels, drains) are there only if the poll was a heartbeat, too.
    """
    values = [tuple(row) for row in rows]
    pairs = read_pairs(row[:6] for row in values)
    _, lease_ends_in, *orders = values[0][5:]
    if not orders:
        return PollResult(pairs, lease_ends_in)
    paused, cancels, drained = orders
    requests = tuple(parse_request(key, info) for key, info in json.loads(cancels))
    return PollResult(
        pairs, lease_ends_in, OperatorRequests(frozenset(paused), requests, frozenset(drained))
    )


def read_seen(rows: Iterable[Sequence[Any]]) -> QueueSnapshots:
    """Read the answer to the statement `look`, the first half of a claim by compare and swap.

    Each row has the first due messages of a queue and a priority as arrays, or the time until the
    first is due. Queues without due messages only give that time.
    """
    seen = QueueSnapshots(0)
    queues: dict[str, QueueSnapshot] = {}
    for now, queue, due_in, version, running, states, *columns in rows:
        seen.now = now
        if queue is None:
            continue
        if queue not in queues:
            infos = {} if states is None else json.loads(states)
            queues[queue] = QueueSnapshot(queue, version, running, infos)
        if due_in > 0:
            seen.delays.append(due_in)
        elif columns[0] is not None:
            seen.queues[queue] = queues[queue]
            queues[queue].candidates += map(Candidate._make, zip(*columns, strict=True))
    return seen


def read_swapped(rows: Iterable[Sequence[Any]], swap: CompareAndSwap) -> ClaimedMessages | None:
    """Read the leased messages, in the order of `swap`; None if the version differed.

    Without any row nothing was written: the queue has changed since it was read, another claim has
    locked it, or it has no row yet. A write that leased no message returns a row of NULLs.
    """
    values = list(rows)
    if not values:
        return None
    rank = {message: n for n, message in enumerate(swap.ids)}
    messages = read_claimed((row for row in values if row[0] is not None), swap.token)
    return ClaimedMessages(sorted(messages, key=lambda message: rank[message.id]))


def build_settle_result(settlements: Sequence[Settlement], settled: set[int]) -> SettleResult:
    """Build the result of `settlements`, of which the ids `settled` were written.

    The others have lost their leases, and nothing was written for them.
    """
    if len(settled) == len(settlements):
        return SettleResult(settled)
    return SettleResult(settled, {s.id for s in settlements} - settled)


def sort_by_due_time(rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Sort by due time and id, without decoding the times.

    PostgreSQL sends a time as signed microseconds since 2000, most significant byte first. So bytes
    sort like times, except that times before 2000 come last; they are moved to the front.
    """
    ordered = sorted(rows, key=_DUE)
    if ordered and ordered[-1][10][0] >= _NEGATIVE:
        first = next(n for n, row in enumerate(ordered) if row[10][0] >= _NEGATIVE)
        ordered = ordered[first:] + ordered[:first]
    return ordered


# SQLSTATEs of PostgreSQL by their meaning for the broker.

_TRANSIENT_CLASSES = frozenset({"08", "40", "53", "57", "58"})
_READ_ONLY = "25006"
_LOCK_NOT_AVAILABLE = "55P03"
_DENIED = frozenset({"42501", "42P01", "3F000"})
"""insufficient_privilege, undefined_table, invalid_schema_name."""
_SESSION_ENDED = frozenset({"25P03", "25P04", "57P01", "57P02", "57P03", "57P04", "57P05"})
"""Time limits of idle sessions and of transactions, a shutdown, a crash, a dropped database."""
_TRANSIENT_CODES = frozenset({_READ_ONLY, "25P03", "25P04", _LOCK_NOT_AVAILABLE})


_UNSENT = {
    "asyncpg": (
        "cannot call ",
        "cannot perform operation: ",
        "cannot switch to state ",
        "connection is closed",
        "not connected",
    ),
    "psycopg": (
        "the connection is closed",
        "sending query failed: another command is already in progress",
        "sending query and params failed: another command is already in progress",
    ),
}
"""Beginnings of the messages of errors that a driver raises before it sends a statement."""


class PostgresqlErrors:
    """The classification of PostgreSQL's errors, for the dialect."""

    def is_transient(self, error: BaseException) -> bool:
        """Return True if the transaction may be repeated, by SQLSTATE.

        Classes: connection, rollback, resources, operator, system; codes: lock wait, read-only,
        time limits.
        """
        code = _get_sqlstate(error)
        return code[:2] in _TRANSIENT_CLASSES or code in _TRANSIENT_CODES

    def was_never_sent(self, error: BaseException) -> bool:
        """Return True if the driver refused the statement, by the message.

        asyncpg and psycopg give such errors no code.
        """
        module = type(error).__module__.partition(".")[0]
        return module in _UNSENT and str(error).startswith(_UNSENT[module])

    def is_denied(self, error: BaseException) -> bool:
        """Return True if a right or a table is missing, by SQLSTATE."""
        return _get_sqlstate(error) in _DENIED

    def is_lock_timeout(self, error: BaseException) -> bool:
        """Return True if the wait for a lock timed out, by SQLSTATE."""
        return _get_sqlstate(error) == _LOCK_NOT_AVAILABLE

    def ends_session(self, error: BaseException) -> bool:
        """Return True if the server ended the session, by SQLSTATE."""
        code = _get_sqlstate(error)
        return code[:2] == "08" or code in _SESSION_ENDED

    @staticmethod
    def is_read_only(error: BaseException) -> bool:
        """Return True on a standby, and under default_transaction_read_only, by SQLSTATE."""
        return _get_sqlstate(error) == _READ_ONLY

    def spoils_connection(self, error: BaseException) -> bool:
        """Return True if the session has ended or is read-only, by SQLSTATE.

        The session of a standby stays read-only, as does that of a server set to
        default_transaction_read_only.
        """
        return self.is_read_only(error) or self.ends_session(error)


def _get_sqlstate(error: BaseException) -> str:
    return str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")
