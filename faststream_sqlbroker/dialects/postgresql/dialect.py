"""PostgreSQL: one statement for each step, arrays for each batch (`postgresql.sql`)."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Connection,
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

from faststream_sqlbroker.core.policies.seen import Seen, Swap
from faststream_sqlbroker.core.rows import (
    Around,
    Claimed,
    ClaimedMessage,
    Leases,
    NewMessage,
    Prefetch,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
    SignOfLife,
)
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.dialects.base import Dialect
from faststream_sqlbroker.dialects.channels import add_registered
from faststream_sqlbroker.dialects.claimed_rows import CLAIMED_COLUMNS, MESSAGE_COLUMNS
from faststream_sqlbroker.dialects.live_subscribers import KEPT_SECONDS
from faststream_sqlbroker.dialects.ordered import OrderedClaims
from faststream_sqlbroker.dialects.policy_sql import POSTGRESQL
from faststream_sqlbroker.dialects.policy_sql import add_statements as add_policy_statements
from faststream_sqlbroker.dialects.postgresql import sql
from faststream_sqlbroker.dialects.postgresql.answers import (
    PostgresqlErrors,
    in_order,
    read_around,
    read_claimed,
    read_pairs,
    settled_of,
)
from faststream_sqlbroker.dialects.postgresql.binds import (
    insert_query,
    lease_binds,
    milliseconds,
    settle_queries,
)
from faststream_sqlbroker.dialects.postgresql.dead_sessions import DeadSessions
from faststream_sqlbroker.dialects.postgresql.numbered_locks import NumberedLocks
from faststream_sqlbroker.dialects.postgresql.on_ack import ON_ACK, on_ack, settling_on_ack
from faststream_sqlbroker.dialects.postgresql.once import (
    CLAIM_FREE_KEYS,
    free_key_binds,
    free_key_types,
    read_claimed_keys,
)
from faststream_sqlbroker.dialects.postgresql.quick_jobs import QuickJobs
from faststream_sqlbroker.dialects.postgresql.swap import (
    read_seen,
    read_swapped,
    swap_binds,
    swap_statements,
)
from faststream_sqlbroker.dialects.query import Query, Work
from faststream_sqlbroker.dialects.replies import add_replies
from faststream_sqlbroker.dialects.sizes import POSTGRESQL as POSTGRESQL_SIZE
from faststream_sqlbroker.dialects.sizes import by_bytes, bytes_of
from faststream_sqlbroker.dialects.suspects import (
    OTHERS,
    SUSPECT,
    SUSPECT_BINDS,
    apart,
    statement_end,
)
from faststream_sqlbroker.schema.tables import Tables


def _array(name: str, item: Any) -> Any:
    return bindparam(name, type_=ARRAY(item))


_BINDS = _array("queues", String), _array("ids", BigInteger), _array("tokens", Uuid)
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


TWO_LENGTHS = "_two_lengths"
"""Ends the names of claims whose rows are not all leased for the same time."""


class PostgresqlDialect(PostgresqlErrors, Dialect):
    """All SQL for PostgreSQL ≥ 13."""

    name = "postgresql"
    isolation_level = "READ COMMITTED"
    can_listen = True
    ranges_by_rows = True
    knows_implied = True
    known_limit = POSTGRESQL_SIZE

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        super().__init__(tables, sqlalchemy_dialect)
        self._prepare_inserts()
        self._prepare_claims()
        self._prepare_settles()
        add = self.add_statement
        queues, ids, tokens = _BINDS
        channel = bindparam("channel", type_=Text)
        self.add_looks(sql.PAIRS, "statement_timestamp()", queues)
        self._prepare_looks_around()
        add("renew", sql.RENEW, ids, tokens, bindparam("lease", type_=Float(53)))
        add("held", sql.HELD, ids, tokens)
        add("lock", sql.LOCK, ids, tokens)
        add("lock_free", sql.LOCK_FREE, ids, tokens)
        add("release_stuck", sql.RELEASE, queues, bindparam("limit", type_=Integer))
        add("lease_ends_in", sql.LEASE_ENDS_IN, queues)
        add("release_claim", sql.RELEASE_CLAIM, queues, bindparam("token", type_=Uuid()))
        add("now", "SELECT statement_timestamp()")
        add("remove", sql.REMOVE, ids)
        add("claim_free_keys", CLAIM_FREE_KEYS, *free_key_types())
        self.ordered = OrderedClaims(self, sql.ORDERED, ids, DateTime(timezone=True))
        add_policy_statements(self, POSTGRESQL)
        self.handler_locks = NumberedLocks(self)
        self.silent_sessions = DeadSessions(tables, sqlalchemy_dialect.identifier_preparer)
        limit = bindparam("limit", type_=Text)
        add("idle_limit", sql.IDLE_LIMIT, limit)
        add("idle_limit_anew", sql.IDLE_LIMIT_ANEW, limit)
        add("allow_idling", sql.ALLOW_IDLING, limit)
        add("lock_numbered", sql.LOCK_NUMBERED, ids, tokens, limit)
        add("lock_wait", "SELECT set_config('lock_timeout', :limit, true)")
        add("notify", "SELECT pg_notify(:channel, q) FROM unnest(:queues) AS q", channel, queues)

    def _prepare_looks_around(self) -> None:
        parts = (sql.LEASES, sql.PAUSED, sql.CANCELS, sql.DRAINED, sql.SIGN_OF_LIFE)
        leases, paused, cancels, drained, sign = (part.format(**self.names) for part in parts)
        binds = _array("queues", String), _array("leased", String)
        self.add_statement(
            "look_around", sql.PAIRS, *binds, which_queues="", sign="", columns=leases
        )
        known = _array("names", String)
        changed = _array("changed", String)
        lengths = (bindparam(name, type_=Float(53)) for name in ("lease", "kept"))
        self.add_statement(
            "look_around_alive",
            sql.PAIRS,
            *(*binds, known, changed, _array("infos", Text), *lengths),
            which_queues="",
            sign=sign,
            columns=leases + paused + cancels + drained,
        )

    def _prepare_inserts(self) -> None:
        literal = "'" + self.names["message"].replace("'", "''") + "'"
        one = (
            bindparam("queue", type_=String),
            bindparam("priority", type_=SmallInteger),
            bindparam("key", type_=String),
            bindparam("delay", type_=Float(53)),
            bindparam("at", type_=DateTime(timezone=True)),
            bindparam("expires_in", type_=Float(53)),
        )
        single = bindparam("payload", type_=LargeBinary), bindparam("headers", type_=Text)
        self.add_statement("insert_one", sql.INSERT_ONE, *one, *single)
        self.add_statement("insert_now", sql.INSERT_NOW, *single)
        self.add_statement("insert_alike", sql.INSERT_ALIKE, *one, *_BODIES)
        self.add_statement("insert_bodies", sql.INSERT_BODIES, *one, _BODIES[0], single[1])
        new = *_NEW, _array("dedup_ids", String)
        conflict = "ON CONFLICT (queue, dedup_id) WHERE dedup_id IS NOT NULL DO NOTHING"
        self.add_statement("insert", sql.INSERT, *new, message_literal=literal, conflict="")
        self.add_statement(
            "insert_dedup", sql.INSERT, *new, message_literal=literal, conflict=conflict
        )

    def _prepare_claims(self) -> None:
        names = ("m." + (self.names["key"] if c == "key" else c) for c in CLAIMED_COLUMNS)
        columns = ", ".join(names).replace("m.headers", "m.headers::text")
        for name in ("created_at", "next_attempt_at", "acquired_at"):
            columns = columns.replace(f"m.{name}", f"timestamptz_send(m.{name})")
        read_at = columns.replace("m.acquired_at", "statement_timestamp()")
        add_registered(self)
        if self.has_archive:
            self.quick_jobs = QuickJobs(self, columns)
        add_replies(
            self,
            read_at,
            claimable="m.state IN ('PENDING', 'RETRYABLE')",
            now="statement_timestamp()",
            order="ORDER BY m.queue, m.priority DESC, m.next_attempt_at, m.id\n",
        )
        queues, ids, _ = _BINDS
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
            self.add_statement(name, claim, *binds, *suspect, **words)
            told_more = {
                **words,
                "columns": columns + sql.IS_WAITING,
                "told": words.get("told", "") + ", NULL",
            }
            claim_two = sql.two_lengths(claim)
            self.add_statement(name + TWO_LENGTHS, claim_two, *binds, *suspect, *two, **told_more)
        self.add_statement("claim_ids", sql.CLAIM_IDS, *these, **plain)
        for name, text, asked in swap_statements(sql.LEASE):
            self.add_statement(name, text, *asked, columns=columns, unsuspected="")
        self.add_statement("claim_ids_apart", sql.CLAIM_IDS_APART, *these, *SUSPECT_BINDS, **alone)

    def _prepare_settles(self) -> None:
        queues, ids, tokens = _BINDS
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
            self.add_statement(name, settle, *binds, **words)
            self.add_statement(name + sql.INSIDE, sql.inside(settle), *binds, **words)
            one = bindparam("one", type_=Integer)
            self.add_statement(name + sql.ANEW, sql.anew(settle), *binds, one, **words)

        if self.has_archive:
            why = (
                _array("reasons", String),
                _array("related", BigInteger),
                _array("fingerprints", String),
            )
            kept = MESSAGE_COLUMNS.format(key=self.names["key"])
            add("archive", sql.ARCHIVE, *ended, *why, columns=kept)
            # Not all columns of the message: one of the user's may have the name of ours.
            of_message = ", ".join(f"m.{column}" for column in kept.split(", "))
            ends = bindparam("ends", type_=Text)
            words = {"columns": kept, "of_message": of_message}
            add("archive_acked", sql.ARCHIVE_ACKED, *held, ends, **words)
            acked_too = on_ack(sql.ARCHIVE_ACKED)
            self.add_statement("archive_acked" + ON_ACK, acked_too, *held, ends, *owned, **words)
        add("delete", sql.DELETE, *held)
        self.add_statement("delete" + ON_ACK, on_ack(sql.DELETE), *held, *owned)
        moved = (
            _array("delays", Float(53)),
            queues,
            _array("payloads", LargeBinary),
            _array("headers", Text),
        )
        counted = _array("published", Integer), _array("hops", Integer), _array("new_keys", Text)
        add("update", sql.UPDATE, *ended, *moved, *counted)

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:
        """The limit is the transaction's own, so that nothing is left of it."""
        if idle_limit is not None:
            connection.execute(self.sql["idle_limit"], {"limit": milliseconds(idle_limit)})

    def begin_anew(self, connection: Connection, idle_limit: float) -> None:
        """As `begin`, in the same statement."""
        connection.execute(self.sql["idle_limit_anew"], {"limit": milliseconds(idle_limit)})

    def allow_idling(self, connection: Connection, seconds: float) -> None:
        """One statement; what the administrator had set is no longer known."""
        connection.execute(self.sql["allow_idling"], {"limit": milliseconds(seconds)})

    def now(self, connection: Connection) -> datetime:
        """The server's clock."""
        value: datetime = connection.execute(self.sql["now"]).scalar_one()
        return value

    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """One statement, unless there is too much for one."""
        self.known_limit.check(rows)
        return [
            i
            for part in by_bytes(rows, lambda row: bytes_of([row]))
            for i in self.inserting(part)(connection)
        ]

    def inserting(self, rows: Sequence[NewMessage]) -> Query[list[int | None]]:
        """Ids are drawn in the statement, so that they are known row by row."""
        return insert_query(self.sql, rows)

    def removing(self, ids: Sequence[int]) -> Query[None]:
        """One statement."""
        return Query(self.sql["remove"], {"ids": list(ids)}, lambda _rows: None)

    def ready_pairs(
        self, connection: Connection, queues: Sequence[str], *, only_open: bool = False
    ) -> ReadyPairs:
        """A loose index scan: one step a pair, whatever the number of rows."""
        statement = self.sql["open_pairs"] if only_open else self.sql["ready_pairs"]
        return Query(statement, {"queues": list(queues)}, read_pairs)(connection)

    def scan(self, queues: Sequence[str]) -> Query[ReadyPairs]:
        """One statement."""
        return Query(self.sql["ready_pairs"], {"queues": list(queues)}, read_pairs)

    def looking_around(
        self, queues: Sequence[str], leased: Sequence[str], sign: SignOfLife | None
    ) -> Query[Around]:
        """One statement."""
        binds: dict[str, Any] = {"queues": list(queues), "leased": list(leased)}
        if sign is None:
            return Query(self.sql["look_around"], binds, read_around)
        names = sorted(sign.known)
        binds |= {
            "names": names,
            "infos": [json.dumps(dict(sign.known[name])) for name in names],
            "changed": sorted(sign.changed),
            "lease": sign.lease,
            "kept": sign.lease + KEPT_SECONDS,
        }
        return Query(self.sql["look_around_alive"], binds, read_around)

    def claim(
        self,
        connection: Connection,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Claimed:
        """One statement; pairs are walked lazily until `limit` rows are found."""
        claiming = self.claiming(pairs, limit, lease, token, suspicion=suspicion, prefetch=prefetch)
        return claiming(connection)

    def claiming(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Query[Claimed]:
        """One statement; RETURNING has no order, so the rows are sorted here."""
        statement = "claim" + statement_end(suspicion)
        binds: dict[str, Any] = {
            "queues": [p.queue for p in pairs],
            "priorities": [p.priority for p in pairs],
            "since": [p.since for p in pairs],
            "limit": limit,
            "lease": lease,
            "token": token,
            **(suspicion.binds if suspicion is not None else {}),
        }
        if prefetch is not None and prefetch.after > 0:
            statement += TWO_LENGTHS
            binds |= {"free": prefetch.after, "waiting": prefetch.lease}
        elif prefetch is not None:
            binds["lease"] = prefetch.lease

        def read(rows: Iterable[Sequence[Any]]) -> Claimed:
            leased, suspects = apart(rows, suspicion)
            leased = in_order(leased)
            claimed = Claimed(self.claimed(leased, token), suspects)
            if prefetch is not None:
                for row, message in zip(leased, claimed, strict=True):
                    message.prefetched = row[-1] if prefetch.after > 0 else True
            if len(pairs) > 1:
                rank = {(p.queue, p.priority): n for n, p in enumerate(pairs)}
                claimed.sort(key=lambda m: rank[m.queue, m.priority])
            return claimed

        return Query(self.sql[statement], binds, read)

    def claimed(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """As everywhere; values need no decoding, or are decoded on first use."""
        return read_claimed(rows, token)

    def claim_ids(
        self,
        connection: Connection,
        ids: Sequence[int],
        queues: Sequence[str],
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
    ) -> Claimed:
        """One statement."""
        binds = {"ids": list(ids), "queues": list(queues), "lease": lease, "token": token}
        if suspicion is None:
            return Claimed(self.claimed(connection.execute(self.sql["claim_ids"], binds), token))
        rows = connection.execute(self.sql["claim_ids_apart"], {**binds, **suspicion.binds})
        leased, suspects = apart(rows, suspicion)
        return Claimed(self.claimed(leased, token), suspects)

    def claiming_free_keys(
        self, rows: Sequence[ClaimedMessage], ttl: float, worker: str
    ) -> Query[set[int]]:
        """One statement."""
        binds = free_key_binds(rows, ttl, worker)
        return Query(self.sql["claim_free_keys"], binds, read_claimed_keys)

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:
        """As everywhere; claims that have read before, and hold no lock, write nothing any more."""
        lock = self.sql["lock_queues"]
        locked = set(connection.execute(lock, {"queues": list(queues)}).scalars())
        if len(locked) < len(queues):
            others = [queue for queue in queues if queue not in locked]
            if rest := super().lock_order(connection, others):
                locked |= set(connection.execute(lock, {"queues": sorted(rest)}).scalars())
        return locked

    def looking_at_queues(
        self,
        queues: Sequence[str],
        *,
        size: int,
        most_running: int,
        scopes: Sequence[str],
        others: Suspicion | None,
    ) -> Query[Seen]:
        """One statement, which locks nothing."""
        binds: dict[str, Any] = {
            "queues": list(queues),
            "scopes": list(scopes),
            "most": most_running,
            "size": size,
        }
        if others is None:
            return Query(self.sql["look"], binds, read_seen)
        return Query(self.sql["look_others"], {**binds, **others.binds}, read_seen)

    def swapping(self, swap: Swap) -> Query[Claimed | None]:
        """One statement."""
        binds = swap_binds(swap)
        return Query(self.sql["swap"], binds, lambda rows: read_swapped(rows, swap))

    def renew(
        self, connection: Connection, leases: Leases, lease: float, *, skip_locked: bool = False
    ) -> set[int]:
        """Locked rows are waited for beforehand, or skipped by the update and looked up without a
        lock.
        """
        if not skip_locked:
            # The update joins on ctid. If it waited for a row that changes, it would look for the
            # old ctid and miss the row; so wait for the locks first.
            self.lock(connection, leases)
        binds = lease_binds(leases)
        held = {r[0] for r in connection.execute(self.sql["renew"], {**binds, "lease": lease})}
        if len(held) < len(leases):
            held |= self.still_held(connection, leases)
        return held

    def lock(
        self, connection: Connection, leases: Leases, *, skip_locked: bool = False
    ) -> set[int]:
        """One statement."""
        statement = self.sql["lock_free" if skip_locked else "lock"]
        return {r[0] for r in connection.execute(statement, lease_binds(leases))}

    def still_held(self, connection: Connection, leases: Leases) -> set[int]:
        """One statement."""
        return {r[0] for r in connection.execute(self.sql["held"], lease_binds(leases))}

    @contextmanager
    def lock_wait_limit(self, connection: Connection, seconds: float) -> Iterator[None]:
        """For the rest of the transaction."""
        connection.execute(self.sql["lock_wait"], {"limit": f"{round(seconds * 1000)}ms"})
        yield

    def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        """At most four statements: acked, otherwise archived, deleted, updated rows."""
        settled: set[int] = set()
        for query in settle_queries(self.sql, settlements, archive=self.has_archive):
            settled |= query(connection)
        return settled_of(settlements, settled)

    def settling(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> Work[SettleResult]:
        """One statement if all end alike; with units, if they are acks of one message each."""
        whole = super().settling(settlements, skip_locked=skip_locked)
        if skip_locked:
            return whole
        if any(True for s in settlements if s.unit is not None):
            archive = self.has_archive
            return settling_on_ack(self.sql, settlements, archive=archive) or whole
        queries = settle_queries(self.sql, settlements, archive=self.has_archive)
        if len(queries) > 1:
            return whole
        [query] = queries
        return Query(
            query.clause, query.binds, lambda rows: settled_of(settlements, query.read(rows))
        )

    def settling_one(self, settlement: Settlement) -> Query[SettleResult]:
        """One statement."""
        [query] = settle_queries(self.sql, [settlement], archive=self.has_archive, anew=True)
        return Query(
            query.clause, query.binds, lambda rows: settled_of([settlement], query.read(rows))
        )

    def release_stuck(self, connection: Connection, queues: Sequence[str], limit: int) -> int:
        """One statement; rows locked elsewhere are skipped."""
        binds = {"queues": list(queues), "limit": limit}
        return len(connection.execute(self.sql["release_stuck"], binds).all())

    def lease_ends_in(self, connection: Connection, queues: Sequence[str]) -> float | None:
        """One descent of the index for each queue."""
        found: float | None = connection.execute(
            self.sql["lease_ends_in"], {"queues": list(queues)}
        ).scalar_one()
        return found

    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """One statement over what is PROCESSING in these queues."""
        binds = {"queues": list(queues), "token": token}
        return len(connection.execute(self.sql["release_claim"], binds).all())

    def notifying(self, channel: str, queues: Sequence[str]) -> Query[None]:
        """One wake-up for each queue on `channel`."""
        return Query(
            self.sql["notify"], {"channel": channel, "queues": list(queues)}, lambda _rows: None
        )
