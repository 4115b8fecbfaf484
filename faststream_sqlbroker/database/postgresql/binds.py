"""PostgreSQL's statements for a batch, and their binds.

asyncpg spends about 0.4 µs on each element of each array. So a value common to a batch is bound
once, a value that nearly every row has is written in a statement of its own, and numbers are sent
as the text of an array, which asyncpg passes on unchanged (0.06 µs an element).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.rows import (
    AckSettlement,
    Leases,
    NewMessage,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.database.parts.sizes import (
    MAX_STATEMENT_BYTES,
    count_bytes,
    split_by_bytes,
)
from faststream_sqlbroker.database.postgresql.results import build_settle_result
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.database.statements import Statements
from faststream_sqlbroker.exceptions import StoreError

MAX_IDLE_MILLISECONDS = 2**31 - 1
"""Maximum of idle_in_transaction_session_timeout."""

_get_common = attrgetter(
    "queue", "priority", "key", "dedup_id", "delay", "next_attempt_at", "expires_in"
)
"""The columns that are bound once if all rows have the same values."""
_get_options = attrgetter("priority", "key", "delay", "next_attempt_at", "expires_in")
_NO_OPTIONS = (0, None, None, None, None)


def build_insert(sql: Statements, rows: Sequence[NewMessage]) -> Query[list[int | None]]:
    """Build the insert of `rows`, by the statement with the fewest binds.

    The driver spends time on each element of an array, so values that all rows share are bound
    once. The result is the ids in order, None where the dedup_id exists already.
    """
    first = rows[0]
    if len(rows) == 1 and first.dedup_id is None:
        return _build_single_insert(sql, first)
    if first.dedup_id is not None or list(map(_get_common, rows)).count(_get_common(first)) != len(
        rows
    ):
        deduplicated = any(row.dedup_id is not None for row in rows)
        return Query(
            sql["insert_dedup" if deduplicated else "insert"],
            build_insert_binds(rows),
            _read_first_column,
        )
    common = _build_common_binds(first)
    payloads = [r.payload for r in rows]
    headers = [r.headers for r in rows]
    if headers.count(headers[0]) == len(headers):
        binds = {**common, "payloads": payloads, "headers": headers[0]}
        return Query(sql["insert_bodies"], binds, partial(_read_sorted_ids, len(rows)))
    binds = {**common, "payloads": payloads, "headers": headers}
    return Query(sql["insert_alike"], binds, partial(_read_sorted_ids, len(rows)))


def _build_single_insert(sql: Statements, row: NewMessage) -> Query[list[int | None]]:
    """Build the insert of one message; without options, by the statement with fewest binds.

    Options are priority, key, delay, due time and expiry. Each bind costs the driver time.
    """
    body = {"queue": row.queue, "payload": row.payload, "headers": row.headers}
    if _get_options(row) == _NO_OPTIONS:
        return Query(sql["insert_now"], body, _read_first_column)
    return Query(sql["insert_one"], _build_common_binds(row) | body, _read_first_column)


def _build_common_binds(row: NewMessage) -> dict[str, Any]:
    """Build the binds that all rows of an insert share: queue and options, not the body."""
    return {
        "queue": row.queue,
        "priority": row.priority,
        "key": row.key,
        "delay": None if row.delay is None else float(row.delay),
        "at": row.next_attempt_at,
        "expires_in": None if row.expires_in is None else float(row.expires_in),
    }


def build_insert_binds(rows: Sequence[NewMessage]) -> dict[str, Any]:
    """Build the binds of an insert of different rows: an array for each column."""
    return {
        "queues": [r.queue for r in rows],
        "payloads": [r.payload for r in rows],
        "headers": [r.headers for r in rows],
        "priorities": [r.priority for r in rows],
        "keys": [r.key for r in rows],
        "dedup_ids": [r.dedup_id for r in rows],
        "delays": _to_floats(r.delay for r in rows),
        "times": [r.next_attempt_at for r in rows],
        "expiries": _to_floats(r.expires_in for r in rows),
    }


def build_settle_queries(
    sql: Statements,
    settlements: Sequence[Settlement],
    *,
    archive: bool,
    inside: str | None = None,
    replan: bool = False,
) -> list[Query[set[int]]]:
    """Build at most four statements, for acked, otherwise archived, deleted and updated rows.

    The result of each is the ids that were written. With `inside`, the statements write nothing
    unless the transaction that they are sent in has this number: a handler may have ended its own.
    With `replan` no cached plan is used, which may be for the table as it was earlier.
    """
    acked, archived, deleted, updated = _group_by_statement(settlements, archive=archive)
    queries: list[tuple[str, dict[str, Any]]] = []
    if acked:
        queries.append(("archive_acked", _build_acked_binds(acked)))
    if archived:
        queries.append(("archive", _build_archive_binds(archived)))
    if deleted:
        queries.append(("delete", _build_held_binds(deleted)))
    queries += [
        ("update", _build_update_binds(part)) for part in split_by_bytes(updated, _count_new_bytes)
    ]
    suffix, variant_binds = _select_variant(inside, replan=replan)
    return [Query(sql[name + suffix], binds | variant_binds, _read_ids) for name, binds in queries]


def build_settle_on_ack(
    sql: Statements, settlements: Sequence[Settlement], *, archive: bool
) -> Query[SettleResult] | None:
    """Build the statement that settles and publishes in autocommit, None if several are needed.

    So acks that publish take one round trip, as acks alone do. A message is inserted if and only if
    the same statement has removed the row that it belongs to.

    A unit is a set of rows that are settled together, or not at all, with the messages of their
    handler. A single statement is enough if no unit has several rows, all rows are acked, or all
    are removed without a trace, and the published messages are not large, wait for no other
    transaction's `dedup_id` and have no lookup value.
    """
    new_messages = [
        (s.id, message) for s in settlements if s.unit is not None for message in s.unit.on_ack
    ]
    messages = [message for _, message in new_messages]
    removing = _build_removal(settlements, archive=archive)
    if removing is None or not _are_simple(settlements, messages):
        return None
    owners = [owner for owner, _ in new_messages]

    def read_rows(rows: Iterable[Sequence[Any]]) -> SettleResult:
        """Check that the messages of each acked row were inserted, and build the result."""
        counts = dict(tuple(row) for row in rows)
        expected = sum(owner in counts for owner in owners)
        if any(count != expected for count in counts.values()):
            msg = (
                f"{expected} messages must be published on ack, but {max(counts.values())} were "
                "inserted; check the table for triggers that skip rows"
            )
            raise StoreError(msg)
        return build_settle_result(settlements, set(counts))

    name, removed = removing
    binds = {**removed, "owners": owners, **build_insert_binds(messages)}
    del binds["dedup_ids"]
    return Query(sql[name + "_on_ack"], binds, read_rows)


def _build_removal(
    settlements: Sequence[Settlement], *, archive: bool
) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the statement that acks or deletes all rows, and the binds.

    For acks that also publish, which must be a single statement. None if the rows need several.
    """
    acked, archived, deleted, updated = _group_by_statement(settlements, archive=archive)
    if archived or updated or (acked and deleted):
        return None
    return (
        ("archive_acked", _build_acked_binds(acked))
        if acked
        else ("delete", _build_held_binds(deleted))
    )


def _are_simple(settlements: Sequence[Settlement], messages: Sequence[NewMessage]) -> bool:
    """Return True if one statement can settle all rows and insert all `messages`.

    A unit is a set of rows that are settled together or not at all. A unit of several rows, a
    `dedup_id`, a lookup value or large bodies need a transaction.
    """
    units = [s.unit for s in settlements if s.unit is not None]
    are_single = len(set(units)) == len(units) and len({s.id for s in settlements}) == len(
        settlements
    )
    needs_more = any(m.dedup_id is not None or m.lookup is not None for m in messages)
    return are_single and not needs_more and count_bytes(messages) <= MAX_STATEMENT_BYTES


def _group_by_statement(
    settlements: Sequence[Settlement], *, archive: bool
) -> tuple[list[Settlement], list[Settlement], list[Settlement], list[Settlement]]:
    """Split the settlements into acked, otherwise archived, deleted, and updated rows.

    Each group takes one statement. Plain acks have the cheapest, because nearly all rows end so.
    Without `archive`, ended rows are deleted. Updated rows stay in their queue, as for a retry.
    """
    acked = list[Settlement]()
    archived = list[Settlement]()
    deleted = list[Settlement]()
    updated = list[Settlement]()
    for s in settlements:
        if s.__class__ is AckSettlement:  # nearly all are, and this needs no property call
            (acked if s.archive and archive else deleted).append(s)
        elif not s.is_final:
            updated.append(s)
        elif not (s.archive and archive):
            deleted.append(s)
        else:
            (acked if s.is_plain_ack else archived).append(s)
    return acked, archived, deleted, updated


def _select_variant(inside: str | None, *, replan: bool) -> tuple[str, dict[str, Any]]:
    """Return the suffix of the statements' names, and their additional binds.

    The variant "anew" gets a new plan at each execution; its bind `one` is needed for that alone.
    The variant "inside" writes only in the transaction of that number.
    """
    if replan:
        return "_anew", {"one": 1}
    return ("", {}) if inside is None else ("_inside", {"transaction": inside})


def _count_new_bytes(settlement: Settlement) -> int:
    """Count the bytes that a settlement writes into the row, for the size of a statement."""
    return (
        len(settlement.payload or b"") + len(settlement.headers or "") + len(settlement.error or "")
    )


def build_lease_binds(leases: Leases) -> dict[str, list[Any]]:
    """Build ids and tokens, pair by pair."""
    return {"ids": [i for i, _ in leases], "tokens": [t for _, t in leases]}


def format_milliseconds(seconds: float) -> str:
    """Format a duration as a server's setting."""
    return f"{min(max(1, round(seconds * 1000)), MAX_IDLE_MILLISECONDS)}ms"


def _build_held_binds(settlements: Sequence[Settlement]) -> dict[str, Any]:
    """Build the ids, and the position of each row's token in `tokens` (`places`, from 1).

    Rows of one claim share a token. Numbers are sent as the text of an array, which the driver does
    not encode element by element.
    """
    positions = list[int]()
    tokens = list[UUID]()
    last = None
    for s in settlements:
        # Identity is enough and cheap: rows of one claim have the same object.
        if s.lease_token is not last:
            last = s.lease_token
            tokens.append(last)
        positions.append(len(tokens))
    ids = repr([s.id for s in settlements])
    return {"ids": f"{{{ids[1:-1]}}}", "places": f"{{{repr(positions)[1:-1]}}}", "tokens": tokens}


def _build_acked_binds(settlements: Sequence[Settlement]) -> dict[str, Any]:
    ends = repr([int(s.ended_after * 1_000_000) for s in settlements])
    return {**_build_held_binds(settlements), "ends": f"{{{ends[1:-1]}}}"}


def _build_archive_binds(settlements: Sequence[Settlement]) -> dict[str, Any]:
    """Build the arrays of the statement `archive`, for rows other than plain acks."""
    return {
        **_build_ended_binds(settlements),
        "reasons": [s.reason for s in settlements],
        "related": [s.related_id for s in settlements],
        "fingerprints": [s.fingerprint for s in settlements],
    }


def _build_update_binds(settlements: Sequence[Settlement]) -> dict[str, Any]:
    """Build the arrays of the statement `update`, for rows that stay in the message table."""
    return {
        **_build_ended_binds(settlements),
        "delays": _to_floats(s.delay for s in settlements),
        "queues": [s.queue for s in settlements],
        "payloads": [s.payload for s in settlements],
        "headers": [s.headers for s in settlements],
        "published": [int(s.published_again) for s in settlements],
        "hops": [s.hop for s in settlements],
        "new_keys": [s.key for s in settlements],
    }


def _build_ended_binds(settlements: Sequence[Settlement]) -> dict[str, list[Any]]:
    """Build the arrays that the statements `archive` and `update` share.

    `charges` is -1 for a delivery that is not to be counted, otherwise 0.
    """
    return {
        **build_lease_binds([(s.id, s.lease_token) for s in settlements]),
        "states": [s.state and s.state.name for s in settlements],
        "attempts": [int(s.attempted) for s in settlements],
        "charges": [-int(s.uncharge) for s in settlements],
        "ends": _to_floats(s.handler_duration for s in settlements),
        "errors": [s.error for s in settlements],
    }


def _to_floats(values: Iterable[float | None]) -> list[float | None]:
    # psycopg refuses an array of both int and float.
    return [None if value is None else float(value) for value in values]


def _read_first_column(rows: Iterable[Sequence[Any]]) -> list[Any]:
    return [row[0] for row in rows]


def _read_sorted_ids(count: int, rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the ids in the order of the inserted rows, for which ids rise.

    Raises:
        StoreError: a trigger has skipped rows, so the ids cannot be assigned.
    """
    ids = sorted([row[0] for row in rows])
    if len(ids) != count:
        msg = (
            f"inserting {count} messages returned {len(ids)} ids; "
            "check the table for triggers that skip rows"
        )
        raise StoreError(msg)
    return ids


def _read_ids(rows: Iterable[Sequence[Any]]) -> set[int]:
    return {row[0] for row in rows}
