"""Statements of claims under scheduling policies; tests/sql shows them as they are sent.

Times are whole microseconds since 1970 (UTC) on the way in and out, so that what policies decide is
the same on every database. Lists of any length are one JSON bind, so the text never changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import BigInteger, Integer, SmallInteger, String, Text, bindparam

from faststream_sqlbroker.core.policies.flags import HEADER_KEY, HELD_BURST, LET_IN
from faststream_sqlbroker.core.policies.standby import STANDBY
from faststream_sqlbroker.dialects.base import Dialect
from faststream_sqlbroker.dialects.claimed_rows import MESSAGE_COLUMNS
from faststream_sqlbroker.dialects.ordered_sql import BY_HEADER, by_header
from faststream_sqlbroker.dialects.suspects import OTHERS, SUSPECT_BINDS

Columns = Mapping[str, str]
"""Names of a JSON row's members, and "int", "key" or "text"."""


@dataclass(frozen=True)
class SqlFragments:
    """What the statements are made of, in the SQL of one database."""

    now: str
    claimable: str
    """Whether `m` can be claimed."""
    us: Callable[[str], str]
    """A time as microseconds."""
    at: Callable[[str], str]
    """Microseconds as a time."""
    rows: Callable[[Columns], str]
    """The bind `rows` as a table `u`."""
    join: str
    """Joins `u`, which is read first, with what follows."""
    update: str
    """Changes rows of the message table `m` that `rows` names: {rows}, {set}, {where}."""
    upsert: str
    """What follows an INSERT … SELECT FROM `u` into the policy state; {expires} and {due} are
    the new times."""
    earlier: str = "LEAST"
    """The function that gives the earlier of two times."""
    as_text: Callable[[str], str] = lambda name: name
    """A JSON column as text."""
    as_json: str = ""
    """Casts text to JSON."""
    column: str = ""
    """The prefix of a column that is set. MySQL updates a join, so it needs one; the others refuse
    it."""
    ready_hint: str = ""
    """Makes a scan for due messages use its index."""
    leased_hint: str = ""
    """The same for leased messages."""
    key_hint: str = ""
    """The same for messages of a key."""
    id_hint: str = ""
    """The same for messages that are looked up by id."""
    of_each: str = "{u} {join} {{message}} m {key_hint} ON {found}"
    """Reads the messages `m` of the keys that `u` lists, key by key: {found}."""
    is_key: str = "= u.k"
    """What says of a key that it is that of `u`."""
    open: str = ""
    close: str = ""
    """Around a key: SQLite gives it as bytes, as text that is not UTF-8 would fail the read."""
    lock: str = " FOR UPDATE"


def _postgresql_rows(columns: Columns) -> str:
    types = {"int": "bigint", "key": "text", "text": "text"}
    listed = ", ".join(f"{name} {types[kind]}" for name, kind in columns.items())
    return f"json_to_recordset((:rows)::json) AS u({listed})"


def _mysql_rows(columns: Columns) -> str:
    # Without it, the columns get the character set of the database, which may lack characters.
    utf8 = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    types = {"int": "BIGINT", "key": f"VARCHAR(255) {utf8}", "text": f"LONGTEXT {utf8}"}
    listed = ", ".join(f"{name} {types[kind]} PATH '$.{name}'" for name, kind in columns.items())
    return f"JSON_TABLE(:rows, '$[*]' COLUMNS ({listed})) u"


def _sqlite_rows(columns: Columns) -> str:
    listed = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in columns)
    return f"(SELECT {listed} FROM json_each(:rows)) u"


POSTGRESQL = SqlFragments(
    now="statement_timestamp()",
    claimable="m.state IN ('PENDING', 'RETRYABLE')",
    us=lambda x: f"(extract(epoch FROM {x}) * 1000000)::bigint",
    # Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255.
    at=lambda x: (
        f"(timestamptz 'epoch' + ({x}) / 1000000 * interval '1 second' "
        f"+ ({x}) % 1000000 * interval '1 microsecond')"
    ),
    rows=_postgresql_rows,
    join="JOIN",
    update="UPDATE {message} m SET {set} FROM {rows} WHERE m.id = u.id AND {where}",
    upsert="ON CONFLICT (scope, {key}) DO UPDATE SET info = excluded.info, "
    "expires_at = excluded.expires_at, due_at = excluded.due_at",
    as_text=lambda name: f"{name}::text",
    as_json="::jsonb",
    # Trap: a join without fresh statistics reads all of the queue, and all of `u` for each message.
    of_each="{u} CROSS JOIN LATERAL (SELECT * FROM {{message}} m WHERE {found} OFFSET 0) m",
)
MYSQL = SqlFragments(
    now="UTC_TIMESTAMP(6)",
    claimable="m.claimable = 1",
    us=lambda x: f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {x})",
    at=lambda x: f"(TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL {x} MICROSECOND)",
    rows=_mysql_rows,
    join="STRAIGHT_JOIN",
    column="m.",
    update="UPDATE {rows} STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id "
    "SET {set} WHERE {where}",
    upsert="ON DUPLICATE KEY UPDATE info = u.info, expires_at = {expires}, due_at = {due}",
    ready_hint="FORCE INDEX ({ready_index})",
    leased_hint="FORCE INDEX ({leased_index})",
    key_hint="FORCE INDEX ({key_index})",
    id_hint="FORCE INDEX (PRIMARY)",
)


def sqlite_fragments(now: str) -> SqlFragments:
    """SQLite's; `now` is its clock."""
    return SqlFragments(
        now=now,
        claimable="m.state IN ('PENDING', 'RETRYABLE')",
        us=lambda x: x,
        at=lambda x: x,
        rows=_sqlite_rows,
        join="CROSS JOIN",
        # With an index, SQLite reads the whole queue, and all of `u` for each message.
        update="UPDATE {message} AS m NOT INDEXED SET {set} FROM {rows} "
        "WHERE m.id = u.id AND {where}",
        upsert="WHERE true ON CONFLICT (scope, {key}) DO UPDATE SET info = excluded.info, "
        "expires_at = excluded.expires_at, due_at = excluded.due_at",
        earlier="MIN",
        ready_hint="INDEXED BY {ready_index}",
        leased_hint="INDEXED BY {leased_index}",
        key_hint="INDEXED BY {key_index}",
        # Another program may have written bytes.
        is_key="IN (u.k, CAST(u.k AS BLOB))",
        open="CAST(",
        close=" AS BLOB)",
        lock="",
    )


_BINDS = {
    "queue": String,
    "scope": String,
    "rows": Text,
    "priority": SmallInteger,
    "before": Integer,
    "own": Integer,
    "mark": Integer,
    "kept": Integer,
    "since": BigInteger,
    "size": Integer,
    "now": BigInteger,
    "only": BigInteger,
}


_OF_QUEUE = "CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1"
"""Of rows that are found by their ids. Trap: without fresh statistics PostgreSQL would find them by
the queue, and read all of it; no index serves a CASE."""
_OF_KEYS = (
    "policy_arrivals",
    "policy_due",
    "policy_live",
    "policy_standby",
    "policy_shift",
    "policy_discard",
    "policy_lock",
    "policy_drop",
)
"""Statements that read keys, on some databases."""


def add_statements(dialect: Dialect, words: SqlFragments) -> None:
    """Add the statements of claims under policies to those of `dialect`."""
    for name, text in _statements(words, archive=dialect.has_archive).items():
        used = [bindparam(b, type_=kind()) for b, kind in _BINDS.items() if f":{b}" in text]
        if "{others}" in text:
            used += SUSPECT_BINDS
        dialect.add_statement(name, text, *used, others=OTHERS.format(of="m."))
        if name.startswith(_OF_KEYS) and (of_header := by_header(text)) != text:
            dialect.add_statement(name + BY_HEADER, of_header, *used, others=OTHERS.format(of="m."))


def _statements(w: SqlFragments, *, archive: bool) -> dict[str, str]:
    """The texts by name, with the names of tables still to fill in."""
    due = (
        f"FROM {{message}} m {w.ready_hint}\n"
        f"WHERE m.queue = :queue AND m.priority = :priority AND {w.claimable} AND "
        f"m.next_attempt_at <= {w.now}"
    )
    marked = "(m.policy_marks & :before) >= :before"
    ids = w.rows({"id": "int"})
    states = w.rows({"k": "key"})
    keyed = w.rows({"k": "key", "info": "text", "expires": "int", "due": "int"})
    found = f"{w.update}".replace("{where}", f"m.queue = :queue AND {w.claimable}")
    shifted = (
        f"{w.column}next_attempt_at = COALESCE({w.at('u.due')}, m.next_attempt_at), "
        f"{w.column}policy_marks = (m.policy_marks | :mark) & :kept"
    )
    given = f"{w.column}policy_key = u.k, {w.column}policy_marks = m.policy_marks | {HEADER_KEY}"
    arrived = _arrived(w)
    delivered = f"m.attempts_count + m.deliveries_count + (m.policy_marks & {LET_IN})"
    texts = {
        "policy_now": f"SELECT {w.us(w.now)}",
        "policy_arrivals": f"SELECT m.id, {w.open}m.{{key}}{w.close}, "
        f"{w.us('m.next_attempt_at')}, {w.us(arrived)},\n"
        f"  CASE WHEN m.expires_at <= {w.now} THEN 1 ELSE 0 END, "
        f"{delivered}, m.policy_marks\n"
        f"{due}\n  AND m.next_attempt_at >= {w.at(':since')} AND {marked}\n"
        "  AND (m.policy_marks & :own) <= 0\n"
        "ORDER BY m.next_attempt_at, m.id LIMIT :size",
        # The list is short, and so are the keys: read key by key, in the order of the list.
        "policy_arrivals_of": f"SELECT m.id, {w.open}m.{{key}}{w.close}, "
        f"{w.us('m.next_attempt_at')}, {w.us(arrived)},\n"
        f"  CASE WHEN m.expires_at <= {w.now} THEN 1 ELSE 0 END, "
        f"{delivered}, m.policy_marks, u.n\n"
        f"FROM {w.rows({'n': 'int', 'k': 'key'})} {w.join} {{message}} m {w.key_hint} "
        "ON m.queue = :queue AND m.{key} = u.k\n"
        f"WHERE {w.claimable} AND m.next_attempt_at <= {w.now} AND {marked}\n"
        "  AND (m.policy_marks & :own) <= 0\n"
        "ORDER BY u.n, m.next_attempt_at, m.id LIMIT :size",
        "policy_shift": found.replace(
            "{rows}", w.rows({"id": "int", "due": "int", "k": "key"})
        ).replace("{set}", shifted)
        + f" AND {_same_key(w)}",
        "policy_headers": f"SELECT m.id, {w.open}m.headers{w.close} AS headers\n"
        f"FROM {ids} {w.join} {{message}} m {w.id_hint} ON m.id = u.id WHERE {_OF_QUEUE}",
        "policy_give_keys": found.replace("{rows}", w.rows({"id": "int", "k": "key"})).replace(
            "{set}", given
        ),
        "policy_states": f"SELECT {w.open}p.{{key}}{w.close}, {w.as_text('p.info')}\n"
        f"FROM {states} {w.join} {{policy_state}} p ON p.scope = :scope AND p.{{key}} = u.k",
        "policy_keep": "INSERT INTO {policy_state} (scope, {key}, info, expires_at, due_at)\n"
        f"SELECT :scope, u.k, u.info{w.as_json}, {w.at('u.expires')}, {w.at('u.due')} "
        f"FROM {keyed}\n"
        + w.upsert.replace("{expires}", w.at("u.expires")).replace("{due}", w.at("u.due")),
        "policy_next_due": f"SELECT {w.us('MIN(p.due_at)')} FROM {{policy_state}} p\n"
        f"WHERE p.scope = :scope AND p.due_at > {w.now}",
        "policy_look_anew": f"UPDATE {{policy_state}} SET due_at = {w.now}\n"
        f"WHERE scope = :scope AND due_at > {w.now}",
        "policy_running": f"SELECT count(*) FROM (SELECT 1 FROM {{message}} m {w.leased_hint}\n"
        "  WHERE m.queue = :queue AND m.state = 'PROCESSING' "
        "AND m.lease_expires_at IS NOT NULL LIMIT :size) r",
        "policy_live": f"SELECT m.id, m.state, {w.us('m.next_attempt_at')}, "
        f"{w.us('m.acquired_at')},\n"
        f"  {w.open}m.{{key}}{w.close}, m.policy_marks, m.deliveries_count - m.attempts_count,\n"
        # SQLite may hold text in the column; `+ 0` makes a number of it.
        f"  CASE WHEN m.expires_at <= {w.now} THEN 1 ELSE 0 END, m.deliveries_count + 0\n"
        f"FROM {ids} {w.join} {{message}} m {w.id_hint} ON m.id = u.id WHERE {_OF_QUEUE}",
    }
    choices = _choices(w, due, marked)
    return texts | choices | _standby(w) | _waits(w) | _discards(w, archive=archive)


def _arrived(w: SqlFragments) -> str:
    # Another program may write created_at by a clock that is ahead. No message arrives after now.
    # SQLite: nor does one that has text in the column.
    return f"{w.earlier}(m.created_at, {w.now})"


def _choices(w: SqlFragments, due: str, marked: str) -> dict[str, str]:
    texts = {}
    for name, which in (("", ""), ("_others", "{others}"), ("_one", "\n  AND m.id = :only")):
        texts[f"policy_due{name}"] = (
            f"SELECT m.id, {w.open}m.{{key}}{w.close}, {w.us('m.next_attempt_at')}\n{due}\n"
            f"  AND m.next_attempt_at <= {w.at(':now')} AND {marked}{which}\n"
            "ORDER BY m.next_attempt_at, m.id LIMIT :size"
        )
    return texts


def _standby(w: SqlFragments) -> dict[str, str]:
    """What stands by for a newer message of its key."""
    standing = f"m.next_attempt_at >= {w.at(str(STANDBY))} AND (m.policy_marks & {HELD_BURST}) > 0"
    read = (
        f"SELECT m.id, {w.open}m.{{key}}{w.close}, {w.us('m.next_attempt_at')},\n"
        f"  CASE WHEN m.expires_at <= {w.now} THEN 1 ELSE 0 END, {w.us(_arrived(w))}"
    )
    texts = {
        "policy_standby_due": f"{read}\nFROM {{message}} m {w.ready_hint}\n"
        f"WHERE m.queue = :queue AND m.priority = :priority AND {w.claimable} AND {standing}\n"
        f"  AND m.next_attempt_at <= {w.at(':now')}\n"
        "ORDER BY m.next_attempt_at, m.id LIMIT :size",
    }
    # No index serves a CASE: that of due times would give all that stands by.
    found = (
        f"m.queue = :queue AND m.{{key}} {w.is_key} AND m.id > u.low AND m.id < u.high\n"
        f"  AND CASE WHEN {w.claimable} AND {standing} THEN 1 ELSE 0 END = 1"
    )
    listed = w.rows({"n": "int", "k": "key", "low": "int", "high": "int"})
    of_each = w.of_each.format(u=listed, join=w.join, key_hint=w.key_hint, found=found)
    for name, order in (("first", ""), ("last", " DESC")):
        texts[f"policy_standby_{name}"] = (
            f"{read}, u.n\nFROM {of_each}\nORDER BY u.n, m.id{order} LIMIT :size"
        )
    return texts


def _waits(w: SqlFragments) -> dict[str, str]:
    """What `broker.admin.policies` looks at: some of what is due, and of what is due later."""
    marked = f"(m.policy_marks & {HEADER_KEY}) <> 0"
    key = f"CASE WHEN {marked} THEN m.policy_key ELSE m.{{key}} END"
    texts = {}
    for name, compared in (("due", "<="), ("later", ">")):
        texts[f"policy_waits_{name}"] = (
            f"SELECT m.id, {w.open}{key}{w.close}, {w.us('m.next_attempt_at')}, m.state,\n"
            f"  CASE WHEN m.expires_at <= {w.now} THEN 1 ELSE 0 END, m.policy_marks, "
            "m.attempts_count, m.deliveries_count\n"
            f"FROM {{message}} m {w.ready_hint}\n"
            f"WHERE m.queue = :queue AND m.priority = :priority AND {w.claimable}\n"
            f"  AND m.next_attempt_at {compared} {w.at(':now')}\n"
            "ORDER BY m.next_attempt_at, m.id LIMIT :size"
        )
    # One row of the index for each key: no database makes a join of a subquery with a limit, and
    # with the index's own order MySQL does not sort.
    texts["policy_firsts"] = (
        f"SELECT {w.open}u.k{w.close}, (\n"
        f"  SELECT e.id FROM {{message}} e {w.ready_hint.replace('ready', 'key')}\n"
        "  WHERE e.queue = :queue AND e.{key} = u.k\n"
        f"    AND (e.expires_at IS NULL OR e.expires_at > {w.now})\n"
        "  ORDER BY queue, {key}, e.id LIMIT 1\n"
        f") FROM {w.rows({'k': 'key'})}"
    )
    return texts


def _plain_due(w: SqlFragments) -> str:
    """When a message was due, without what was added while it stood by."""
    due = w.at(f"({w.us('m.next_attempt_at')} - {STANDBY})")
    return (
        f"CASE WHEN m.next_attempt_at >= {w.at(str(STANDBY))} "
        f"AND (m.policy_marks & {HELD_BURST}) > 0 THEN {due} ELSE m.next_attempt_at END"
    )


def _same_key(w: SqlFragments) -> str:
    # The race: an operator's edit of the key commits after the claim has read it.
    return f"(u.k IS NULL OR {w.open}m.{{key}}{w.close} = {w.open}u.k{w.close})"


def _discards(w: SqlFragments, *, archive: bool) -> dict[str, str]:
    rows = w.rows({"id": "int", "reason": "text", "related_id": "int", "k": "key"})
    given = {"state": "'DISCARDED'", "next_attempt_at": _plain_due(w)}
    of_message = ", ".join(
        given.get(column, f"m.{column}") for column in MESSAGE_COLUMNS.split(", ")
    )
    insert = f"INSERT INTO {{archive}} ({MESSAGE_COLUMNS}, archived_at, reason, related_id)\n"
    these = f"m.queue = :queue AND {w.claimable}"
    still = f"{these}\n  AND {_same_key(w)}"
    if w is POSTGRESQL:
        gone = (
            f"DELETE FROM {{message}} m USING u WHERE m.id = u.id AND {still}\n"
            "  RETURNING m.*, u.reason AS why, u.related_id AS whom"
        )
        kept = of_message.replace("m.", "d.")
        text = f"WITH u AS MATERIALIZED (SELECT * FROM {rows}), d AS (\n  {gone}\n)"
        if archive:
            text += f", a AS (\n  {insert}  SELECT {kept}, {w.now}, d.why, d.whom FROM d\n)"
        return {
            "policy_discard": f"{text}\nSELECT count(*) FROM d",
            "policy_drop": f"DELETE FROM {{message}} m USING {rows} WHERE m.id = u.id AND {still}",
        }
    found = f"FROM {rows} {w.join} {{message}} m {w.id_hint} ON m.id = u.id WHERE "
    held = found + these
    if w is MYSQL:
        delete = f"DELETE m {held}"
    else:
        delete = (
            "DELETE FROM {message} AS m NOT INDEXED "
            f"WHERE m.id IN (SELECT u.id FROM {rows}) AND {these}"
        )
    # MySQL refuses to lock the rows of a JSON_TABLE (error 3569), unless it is in a subquery.
    locked = found.replace(rows, f"(SELECT * FROM {rows}) u") if w is MYSQL else found
    texts = {
        "policy_lock": f"SELECT m.id {locked}{still} ORDER BY m.id{w.lock}",
        "policy_drop": delete,
    }
    if archive:
        texts["policy_archive"] = (
            f"{insert}SELECT {of_message}, {w.now}, u.reason, u.related_id\n{held}"
        )
    return texts
