"""Which of PostgreSQL's statements a batch takes, and its binds.

asyncpg spends about 0.4 µs on each element of each array, so what is common to a batch is bound
once, what nearly every row has is left to a statement that says so, and numbers go as the text of
an array, which it sends as it is (0.06 µs an element).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.rows import Acked, Leases, NewMessage, Settlement, SettleResult
from faststream_sqlbroker.database.parts.sizes import BYTES_TOGETHER, by_bytes, bytes_of
from faststream_sqlbroker.database.postgresql.answers import settled_of
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.database.statements import Statements
from faststream_sqlbroker.exceptions import StoreError

MOST_MILLISECONDS = 2**31 - 1
"""Of idle_in_transaction_session_timeout."""

_common = attrgetter(
    "queue", "priority", "key", "dedup_id", "delay", "next_attempt_at", "expires_in"
)
"""What is bound once if all rows have the same."""
_options = attrgetter("priority", "key", "delay", "next_attempt_at", "expires_in")
_NO_OPTIONS = (0, None, None, None, None)


def insert_query(sql: Statements, rows: Sequence[NewMessage]) -> Query[list[int | None]]:
    """The insert of `rows`; gives their ids in order, None where dedup_id exists."""
    first = rows[0]
    if len(rows) == 1 and first.dedup_id is None:
        return _insert_one(sql, first)
    if first.dedup_id is not None or list(map(_common, rows)).count(_common(first)) != len(rows):
        deduplicated = any(row.dedup_id is not None for row in rows)
        return Query(sql["insert_dedup" if deduplicated else "insert"], insert_binds(rows), _firsts)
    common = _common_binds(first)
    payloads = [r.payload for r in rows]
    headers = [r.headers for r in rows]
    if headers.count(headers[0]) == len(headers):
        binds = {**common, "payloads": payloads, "headers": headers[0]}
        return Query(sql["insert_bodies"], binds, partial(_sorted_ids, len(rows)))
    binds = {**common, "payloads": payloads, "headers": headers}
    return Query(sql["insert_alike"], binds, partial(_sorted_ids, len(rows)))


def _insert_one(sql: Statements, row: NewMessage) -> Query[list[int | None]]:
    body = {"queue": row.queue, "payload": row.payload, "headers": row.headers}
    if _options(row) == _NO_OPTIONS:
        return Query(sql["insert_now"], body, _firsts)
    return Query(sql["insert_one"], _common_binds(row) | body, _firsts)


def _common_binds(row: NewMessage) -> dict[str, Any]:
    return {
        "queue": row.queue,
        "priority": row.priority,
        "key": row.key,
        "delay": None if row.delay is None else float(row.delay),
        "at": row.next_attempt_at,
        "expires_in": None if row.expires_in is None else float(row.expires_in),
    }


def insert_binds(rows: Sequence[NewMessage]) -> dict[str, Any]:
    """One array for each column."""
    return {
        "queues": [r.queue for r in rows],
        "payloads": [r.payload for r in rows],
        "headers": [r.headers for r in rows],
        "priorities": [r.priority for r in rows],
        "keys": [r.key for r in rows],
        "dedup_ids": [r.dedup_id for r in rows],
        "delays": _floats(r.delay for r in rows),
        "times": [r.next_attempt_at for r in rows],
        "expiries": _floats(r.expires_in for r in rows),
    }


def settle_queries(
    sql: Statements,
    settlements: Sequence[Settlement],
    *,
    archive: bool,
    inside: str | None = None,
    anew: bool = False,
) -> list[Query[set[int]]]:
    """At most four statements: acked, otherwise archived, deleted and updated rows; each gives what
    it wrote.

    They write nothing if the transaction `inside` is given and is not the one that they are sent
    in. With `anew` no plan of an earlier time is used.
    """
    acked, archived, deleted, updated = _by_statement(settlements, archive=archive)
    queries: list[tuple[str, dict[str, Any]]] = []
    if acked:
        queries.append(("archive_acked", _acked_binds(acked)))
    if archived:
        queries.append(("archive", _archive_binds(archived)))
    if deleted:
        queries.append(("delete", _held(deleted)))
    queries += [("update", _update_binds(part)) for part in by_bytes(updated, _new_bytes)]
    end, own = _variant(inside, anew=anew)
    return [Query(sql[name + end], binds | own, _ids) for name, binds in queries]


def settling_on_ack(
    sql: Statements, settlements: Sequence[Settlement], *, archive: bool
) -> Query[SettleResult] | None:
    """The one statement that settles and publishes, and commits by itself; None: it takes several.

    So acks that publish take one round trip, as acks alone do. A message is inserted if and only if
    the same statement has removed the row that it belongs to.

    One is enough if no unit has several rows, all rows are acked, or all are removed without a
    trace, and what is published is not large, waits for no other transaction's `dedup_id` and has
    no lookup value.
    """
    published = [
        (s.id, message) for s in settlements if s.unit is not None for message in s.unit.on_ack
    ]
    messages = [message for _, message in published]
    removing = _removing_all(settlements, archive=archive)
    if removing is None or not _are_simple(settlements, messages):
        return None
    owners = [owner for owner, _ in published]

    def read(rows: Iterable[Sequence[Any]]) -> SettleResult:
        counts = dict(tuple(row) for row in rows)
        expected = sum(owner in counts for owner in owners)
        if any(count != expected for count in counts.values()):
            msg = (
                f"{expected} messages were published with their acks, but {max(counts.values())} "
                "were inserted: is there a trigger on the table?"
            )
            raise StoreError(msg)
        return settled_of(settlements, set(counts))

    name, removed = removing
    binds = {**removed, "owners": owners, **insert_binds(messages)}
    del binds["dedup_ids"]
    return Query(sql[name + "_on_ack"], binds, read)


def _removing_all(
    settlements: Sequence[Settlement], *, archive: bool
) -> tuple[str, dict[str, Any]] | None:
    """The statement that acks or deletes all rows, and its binds; None: it takes several."""
    acked, archived, deleted, updated = _by_statement(settlements, archive=archive)
    if archived or updated or (acked and deleted):
        return None
    return ("archive_acked", _acked_binds(acked)) if acked else ("delete", _held(deleted))


def _are_simple(settlements: Sequence[Settlement], messages: Sequence[NewMessage]) -> bool:
    units = [s.unit for s in settlements if s.unit is not None]
    alone = len(set(units)) == len(units) and len({s.id for s in settlements}) == len(settlements)
    more = any(m.dedup_id is not None or m.lookup is not None for m in messages)
    return alone and not more and bytes_of(messages) <= BYTES_TOGETHER


def _by_statement(
    settlements: Sequence[Settlement], *, archive: bool
) -> tuple[list[Settlement], list[Settlement], list[Settlement], list[Settlement]]:
    """Those that are acked, otherwise archived, deleted, and updated."""
    acked = list[Settlement]()
    archived = list[Settlement]()
    deleted = list[Settlement]()
    updated = list[Settlement]()
    for s in settlements:
        if s.__class__ is Acked:  # nearly all are, and this needs no property call
            (acked if s.archive and archive else deleted).append(s)
        elif not s.leaves:
            updated.append(s)
        elif not (s.archive and archive):
            deleted.append(s)
        else:
            (acked if s.plain_ack else archived).append(s)
    return acked, archived, deleted, updated


def _variant(inside: str | None, *, anew: bool) -> tuple[str, dict[str, Any]]:
    """How the names of the statements end, and what they ask for besides."""
    if anew:
        return "_anew", {"one": 1}
    return ("", {}) if inside is None else ("_inside", {"transaction": inside})


def _new_bytes(settlement: Settlement) -> int:
    return (
        len(settlement.payload or b"") + len(settlement.headers or "") + len(settlement.error or "")
    )


def lease_binds(leases: Leases) -> dict[str, list[Any]]:
    """Ids and tokens, pair by pair."""
    return {"ids": [i for i, _ in leases], "tokens": [t for _, t in leases]}


def milliseconds(seconds: float) -> str:
    """As a server's setting."""
    return f"{min(max(1, round(seconds * 1000)), MOST_MILLISECONDS)}ms"


def _held(settlements: Sequence[Settlement]) -> dict[str, Any]:
    """Ids, and for each the place of its token in `tokens`; messages of one claim share a token."""
    places = list[int]()
    tokens = list[UUID]()
    last = None
    for s in settlements:
        if s.lease_token is not last:
            last = s.lease_token
            tokens.append(last)
        places.append(len(tokens))
    ids = repr([s.id for s in settlements])
    return {"ids": f"{{{ids[1:-1]}}}", "places": f"{{{repr(places)[1:-1]}}}", "tokens": tokens}


def _leases(settlements: Sequence[Settlement]) -> dict[str, list[Any]]:
    return {"ids": [s.id for s in settlements], "tokens": [s.lease_token for s in settlements]}


def _acked_binds(settlements: Sequence[Settlement]) -> dict[str, Any]:
    ends = repr([int(s.ended_after * 1_000_000) for s in settlements])
    return {**_held(settlements), "ends": f"{{{ends[1:-1]}}}"}


def _archive_binds(settlements: Sequence[Settlement]) -> dict[str, Any]:
    return {
        **_ended(settlements),
        "reasons": [s.reason for s in settlements],
        "related": [s.related_id for s in settlements],
        "fingerprints": [s.fingerprint for s in settlements],
    }


def _update_binds(settlements: Sequence[Settlement]) -> dict[str, Any]:
    return {
        **_ended(settlements),
        "delays": _floats(s.delay for s in settlements),
        "queues": [s.queue for s in settlements],
        "payloads": [s.payload for s in settlements],
        "headers": [s.headers for s in settlements],
        "published": [int(s.published_again) for s in settlements],
        "hops": [s.hop for s in settlements],
        "new_keys": [s.key for s in settlements],
    }


def _ended(settlements: Sequence[Settlement]) -> dict[str, list[Any]]:
    return {
        **_leases(settlements),
        "states": [s.state and s.state.name for s in settlements],
        "attempts": [int(s.attempted) for s in settlements],
        "charges": [-int(s.uncharge) for s in settlements],
        "ends": _floats(s.ended for s in settlements),
        "errors": [s.error for s in settlements],
    }


def _floats(values: Iterable[float | None]) -> list[float | None]:
    # psycopg refuses an array of both int and float.
    return [None if value is None else float(value) for value in values]


def _firsts(rows: Iterable[Sequence[Any]]) -> list[Any]:
    return [row[0] for row in rows]


def _sorted_ids(count: int, rows: Iterable[Sequence[Any]]) -> list[Any]:
    ids = sorted([row[0] for row in rows])
    if len(ids) != count:
        msg = (
            f"{count} messages were inserted, but {len(ids)} ids came back: "
            "is there a trigger on the table?"
        )
        raise StoreError(msg)
    return ids


def _ids(rows: Iterable[Sequence[Any]]) -> set[int]:
    return {row[0] for row in rows}
