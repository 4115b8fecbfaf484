"""The statements of PostgreSQL, with their binds."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    DateTime,
    Float,
    Integer,
    LargeBinary,
    SmallInteger,
    String,
    Text,
    Uuid,
    bindparam,
)
from sqlalchemy.dialects.postgresql import ARRAY

from faststream_sqlbroker.dialects.claimed_rows import CLAIMED_COLUMNS, MESSAGE_COLUMNS
from faststream_sqlbroker.dialects.operations import Operations
from faststream_sqlbroker.dialects.postgresql import sql
from faststream_sqlbroker.dialects.postgresql.on_ack import ON_ACK, on_ack
from faststream_sqlbroker.dialects.postgresql.once import CLAIM_FREE_KEYS, free_key_types
from faststream_sqlbroker.dialects.postgresql.swap import swap_statements
from faststream_sqlbroker.dialects.suspects import OTHERS, SUSPECT, SUSPECT_BINDS

TWO_LENGTHS = "_two_lengths"
"""Ends the names of claims whose rows are not all leased for the same time."""


def _array(name: str, item: Any) -> Any:
    return bindparam(name, type_=ARRAY(item))


BINDS = _array("queues", String), _array("ids", BigInteger), _array("tokens", Uuid)
"""Queues, ids and tokens of leases, each as an array."""
_BODIES = _array("payloads", LargeBinary), _array("headers", Text)
_NEW = (
    _array("queues", String),
    *_BODIES,
    _array("priorities", SmallInteger),
    _array("keys", String),
    _array("delays", Float(53)),
    _array("times", DateTime(timezone=True)),
    _array("expiries", Float(53)),
)
"""Of messages to insert, each with its own values."""


def claimed_columns(names: Mapping[str, str]) -> str:
    """What a claim returns of `m`; `names` are those of the tables and of the column of keys."""
    columns = ", ".join("m." + (names["key"] if c == "key" else c) for c in CLAIMED_COLUMNS)
    columns = columns.replace("m.headers", "m.headers::text")
    for name in ("created_at", "next_attempt_at", "acquired_at"):
        columns = columns.replace(f"m.{name}", f"timestamptz_send(m.{name})")
    return columns


def kept_columns(names: Mapping[str, str]) -> dict[str, str]:
    """What `KEEP_ACKED` is filled with: the columns that the archive keeps, and those of `m`."""
    kept = MESSAGE_COLUMNS.format(key=names["key"])
    # Not all columns of the message: one of the user's may have the name of ours.
    of_message = ", ".join(f"m.{column}" for column in kept.split(", "))
    return {"columns": kept, "of_message": of_message}


def add_statements(dialect: Operations) -> None:
    """Add them to `dialect`."""
    _add_inserts(dialect)
    _add_claims(dialect, claimed_columns(dialect.names))
    _add_settles(dialect)
    _add_looks_around(dialect)
    _add_leases(dialect)
    _add_transactions(dialect)


def _add_leases(dialect: Operations) -> None:
    """Those that renew, lock and release what was leased."""
    add = dialect.add_statement
    queues, ids, tokens = BINDS
    add("renew", sql.RENEW, ids, tokens, bindparam("lease", type_=Float(53)))
    add("held", sql.HELD, ids, tokens)
    add("lock", sql.LOCK, ids, tokens)
    add("lock_free", sql.LOCK_FREE, ids, tokens)
    limits = bindparam("limit", type_=Integer), bindparam("before", type_=DateTime(timezone=True))
    add("release_stuck", sql.RELEASE, queues, *limits)
    add("lease_ends_in", sql.LEASE_ENDS_IN, queues)
    add("release_claim", sql.RELEASE_CLAIM, queues, bindparam("token", type_=Uuid()))
    add("remove", sql.REMOVE, ids)
    add("claim_free_keys", CLAIM_FREE_KEYS, *free_key_types())


def _add_transactions(dialect: Operations) -> None:
    """Those about a transaction, a session and the server."""
    add = dialect.add_statement
    queues, ids, tokens = BINDS
    limit = bindparam("limit", type_=Text)
    add("now", "SELECT statement_timestamp()")
    add("idle_limit", sql.IDLE_LIMIT, limit)
    add("idle_limit_anew", sql.IDLE_LIMIT_ANEW, limit)
    add("allow_idling", sql.ALLOW_IDLING, limit)
    add("lock_numbered", sql.LOCK_NUMBERED, ids, tokens, limit)
    add("lock_wait", "SELECT set_config('lock_timeout', :limit, true)")
    channel = bindparam("channel", type_=Text)
    add("notify", "SELECT pg_notify(:channel, q) FROM unnest(:queues) AS q", channel, queues)


def _add_inserts(dialect: Operations) -> None:
    """Those that write new messages."""
    literal = "'" + dialect.names["message"].replace("'", "''") + "'"
    one = (
        bindparam("queue", type_=String),
        bindparam("priority", type_=SmallInteger),
        bindparam("key", type_=String),
        bindparam("delay", type_=Float(53)),
        bindparam("at", type_=DateTime(timezone=True)),
        bindparam("expires_in", type_=Float(53)),
    )
    single = bindparam("payload", type_=LargeBinary), bindparam("headers", type_=Text)
    dialect.add_statement("insert_one", sql.INSERT_ONE, *one, *single)
    dialect.add_statement("insert_now", sql.INSERT_NOW, *single)
    dialect.add_statement("insert_alike", sql.INSERT_ALIKE, *one, *_BODIES)
    dialect.add_statement("insert_bodies", sql.INSERT_BODIES, *one, _BODIES[0], single[1])
    new = *_NEW, _array("dedup_ids", String)
    conflict = "ON CONFLICT (queue, dedup_id) WHERE dedup_id IS NOT NULL DO NOTHING"
    dialect.add_statement("insert", sql.INSERT, *new, message_literal=literal, conflict="")
    dialect.add_statement(
        "insert_dedup", sql.INSERT, *new, message_literal=literal, conflict=conflict
    )


def _add_claims(dialect: Operations, columns: str) -> None:
    """Those that lease messages."""
    queues, ids, _ = BINDS
    lease = bindparam("lease", type_=Float(53))
    token = bindparam("token", type_=Uuid())
    times = _array("since", DateTime(timezone=True))
    limit = bindparam("limit", type_=Integer)
    binds = queues, _array("priorities", SmallInteger), times, limit, lease, token
    these = ids, queues, lease, token
    plain = {"columns": columns, "asked": "", "which": "", "unsuspected": ""}
    told = {
        "id": "r.id",
        "attempts_count": "r.attempts_count",
        "deliveries_count": "r.deliveries_count",
    }
    alone = {
        **plain,
        "asked": ", m.id, m.attempts_count, m.deliveries_count,\n"
        f"      {SUSPECT.format(of='m.')} AS suspect",
        "unsuspected": " WHERE NOT r.suspect",
        "told": ", ".join(told.get(name, "NULL") for name in CLAIMED_COLUMNS),
    }
    others = {**plain, "which": OTHERS.format(of="m.")}
    two = bindparam("free", type_=Integer), bindparam("waiting", type_=Float(53))
    for name, claim, suspect, words in (
        ("claim", sql.CLAIM, (), plain),
        ("claim_others", sql.CLAIM, SUSPECT_BINDS, others),
        ("claim_apart", sql.CLAIM_APART, SUSPECT_BINDS, alone),
    ):
        dialect.add_statement(name, claim, *binds, *suspect, **words)
        told_more = {
            **words,
            "columns": columns + sql.IS_WAITING,
            "told": words.get("told", "") + ", NULL",
        }
        claim_two = sql.two_lengths(claim)
        dialect.add_statement(name + TWO_LENGTHS, claim_two, *binds, *suspect, *two, **told_more)
    dialect.add_statement("claim_ids", sql.CLAIM_IDS, *these, **plain)
    for name, text, asked in swap_statements(sql.LEASE):
        dialect.add_statement(name, text, *asked, columns=columns, unsuspected="")
    dialect.add_statement("claim_ids_apart", sql.CLAIM_IDS_APART, *these, *SUSPECT_BINDS, **alone)


def _add_settles(dialect: Operations) -> None:
    """Those that end deliveries."""
    queues, ids, tokens = BINDS
    ended = (
        ids,
        tokens,
        _array("states", String),
        _array("attempts", Integer),
        _array("charges", Integer),
        _array("ends", Float(53)),
        _array("errors", Text),
    )
    held = bindparam("ids", type_=Text), bindparam("places", type_=Text), tokens
    owned = _array("owners", BigInteger), *_NEW

    def add(name: str, settle: str, *binds: Any, **words: str) -> None:
        dialect.add_statement(name, settle, *binds, **words)
        dialect.add_statement(name + sql.INSIDE, sql.inside(settle), *binds, **words)
        one = bindparam("one", type_=Integer)
        dialect.add_statement(name + sql.ANEW, sql.anew(settle), *binds, one, **words)

    if dialect.has_archive:
        why = (
            _array("reasons", String),
            _array("related", BigInteger),
            _array("fingerprints", String),
        )
        words = kept_columns(dialect.names)
        add("archive", sql.ARCHIVE, *ended, *why, columns=words["columns"])
        ends = bindparam("ends", type_=Text)
        add("archive_acked", sql.ARCHIVE_ACKED, *held, ends, **words)
        acked_too = on_ack(sql.ARCHIVE_ACKED)
        dialect.add_statement("archive_acked" + ON_ACK, acked_too, *held, ends, *owned, **words)
    add("delete", sql.DELETE, *held)
    dialect.add_statement("delete" + ON_ACK, on_ack(sql.DELETE), *held, *owned)
    moved = (
        _array("delays", Float(53)),
        queues,
        _array("payloads", LargeBinary),
        _array("headers", Text),
    )
    counted = _array("published", Integer), _array("hops", Integer), _array("new_keys", Text)
    add("update", sql.UPDATE, *ended, *moved, *counted)


def _add_looks_around(dialect: Operations) -> None:
    """The scan for ready pairs, with all else that a process looks at."""
    parts = (sql.LEASES, sql.PAUSED, sql.CANCELS, sql.DRAINED, sql.SIGN_OF_LIFE)
    leases, paused, cancels, drained, sign = (part.format(**dialect.names) for part in parts)
    binds = _array("queues", String), _array("leased", String)
    dialect.add_statement(
        "look_around", sql.PAIRS, *binds, which_queues="", sign="", columns=leases
    )
    known = _array("names", String)
    changed = _array("changed", String)
    lengths = (bindparam(name, type_=Float(53)) for name in ("lease", "kept"))
    dialect.add_statement(
        "look_around_alive",
        sql.PAIRS,
        *(*binds, known, changed, _array("infos", Text), *lengths),
        which_queues="",
        sign=sign,
        columns=leases + paused + cancels + drained,
    )
