"""PostgreSQL: one statement for each step, arrays for each batch.

Every array is one bind, so the text never changes and stays prepared whatever the batch's size. State
literals are inlined: a bound state could not use the partial indexes in a generic plan.
"""

from collections.abc import Sequence
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

from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    NewMessage,
    ReadyPair,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.dialects.base import CLAIMED_COLUMNS, MESSAGE_COLUMNS, Dialect
from faststream_sqlbroker.schema.tables import Tables

_INSERT = """
WITH r AS MATERIALIZED (
  SELECT nextval((SELECT pg_get_serial_sequence({message_literal}, 'id')::regclass)) AS id, u.*
  FROM unnest(:queues, :payloads, :headers, :priorities, :keys, :dedup_ids, :delays, :times, :expiries)
    WITH ORDINALITY AS u(queue, payload, headers, priority, key, dedup_id, delay, at, expires_in, ord)
), i AS (
  INSERT INTO {message}
    (id, queue, payload, headers, priority, {key}, dedup_id, created_at, next_attempt_at, expires_at)
  SELECT r.id, r.queue, r.payload, r.headers::jsonb, r.priority, r.key, r.dedup_id, statement_timestamp(),
    coalesce(r.at, statement_timestamp() + coalesce(r.delay, 0) * interval '1 second'),
    statement_timestamp() + r.expires_in * interval '1 second'
  FROM r ORDER BY r.ord
  {conflict}
  RETURNING id
)
SELECT i.id FROM r LEFT JOIN i ON i.id = r.id ORDER BY r.ord
"""

_PAIRS = """
WITH RECURSIVE p(queue, ord, priority) AS (
  SELECT q.queue, q.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = q.queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM unnest(:queues) WITH ORDINALITY AS q(queue, ord)
  UNION ALL
  SELECT p.queue, p.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = p.queue AND m.priority < p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
)
SELECT p.queue, p.priority, (
  SELECT extract(epoch FROM m.next_attempt_at - statement_timestamp())::float8 FROM {message} m
  WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
  ORDER BY m.next_attempt_at, m.id LIMIT 1) AS due_in
FROM p WHERE p.priority IS NOT NULL ORDER BY p.ord, p.priority DESC
"""

# Rows are taken by ctid: joined on id, the planner chose a sequential scan at 20 000 rows.
_CLAIM = """
WITH r AS MATERIALIZED (
  SELECT x.c
  FROM unnest(:queues, :priorities) WITH ORDINALITY AS p(queue, priority, ord)
  CROSS JOIN LATERAL (
    SELECT m.ctid AS c FROM {message} m
    WHERE m.queue = p.queue AND m.priority = p.priority
      AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    ORDER BY m.next_attempt_at, m.id LIMIT :limit FOR UPDATE SKIP LOCKED) x
  LIMIT :limit
)
UPDATE {message} m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING {columns}
"""

_RENEW = """
WITH r AS MATERIALIZED (
  SELECT m.ctid AS c
  FROM unnest(:ids, :tokens) AS u(id, token) JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
  ORDER BY m.id FOR UPDATE OF m SKIP LOCKED
)
UPDATE {message} m SET lease_expires_at = statement_timestamp() + :lease * interval '1 second'
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING m.id
"""

_HELD = """
SELECT m.id FROM unnest(:ids, :tokens) AS u(id, token)
JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
"""

_ARCHIVE = """
WITH u AS MATERIALIZED (
  SELECT * FROM unnest(:ids, :tokens, :states, :attempts, :charges, :ends, :reasons, :errors)
    AS u(id, token, state, attempts, charge, ended, reason, error)
), d AS (
  DELETE FROM {message} m USING u WHERE m.id = u.id AND m.lease_token = u.token RETURNING m.*
), a AS (
  INSERT INTO {archive} ({columns}, archived_at, reason)
  SELECT d.id, d.queue, d.priority, d.{key}, d.dedup_id, d.headers, d.payload, u.state,
    d.attempts_count + u.attempts, d.deliveries_count + u.charge, d.publish_count, d.origin_id,
    d.created_at, d.next_attempt_at, d.expires_at,
    CASE WHEN u.attempts > 0
      THEN coalesce(d.first_attempt_at, d.acquired_at + u.ended * interval '1 second')
      ELSE d.first_attempt_at END,
    CASE WHEN u.attempts > 0
      THEN d.acquired_at + u.ended * interval '1 second' ELSE d.last_attempt_at END,
    d.acquired_at, coalesce(u.error, d.last_error), statement_timestamp(), u.reason
  FROM d JOIN u ON u.id = d.id AND u.token = d.lease_token
)
SELECT id FROM d
"""

_DELETE = """
DELETE FROM {message} m USING unnest(:ids, :tokens) AS u(id, token)
WHERE m.id = u.id AND m.lease_token = u.token
RETURNING m.id
"""

_UPDATE = """
UPDATE {message} m
SET state = coalesce(u.state, CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END),
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  attempts_count = CASE WHEN u.queue IS NULL THEN m.attempts_count + u.attempts ELSE 0 END,
  deliveries_count = CASE WHEN u.queue IS NULL THEN m.deliveries_count + u.charge ELSE 0 END,
  next_attempt_at = CASE WHEN u.delay IS NULL THEN m.next_attempt_at
    ELSE statement_timestamp() + u.delay * interval '1 second' END,
  first_attempt_at = CASE WHEN u.queue IS NOT NULL THEN NULL
    WHEN u.attempts > 0 THEN coalesce(m.first_attempt_at, m.acquired_at + u.ended * interval '1 second')
    ELSE m.first_attempt_at END,
  last_attempt_at = CASE WHEN u.queue IS NOT NULL THEN NULL
    WHEN u.attempts > 0 THEN m.acquired_at + u.ended * interval '1 second' ELSE m.last_attempt_at END,
  last_error = coalesce(u.error, m.last_error),
  queue = coalesce(u.queue, m.queue),
  dedup_id = CASE WHEN u.queue IS NULL THEN m.dedup_id END,
  payload = coalesce(u.payload, m.payload)
FROM unnest(:ids, :tokens, :states, :attempts, :charges, :ends, :delays, :errors, :queues, :payloads)
  AS u(id, token, state, attempts, charge, ended, delay, error, queue, payload)
WHERE m.id = u.id AND m.lease_token = u.token
RETURNING m.id
"""

_RELEASE = """
WITH r AS MATERIALIZED (
  SELECT x.c FROM unnest(:queues) AS q(queue)
  CROSS JOIN LATERAL (
    SELECT m.ctid AS c FROM {message} m
    WHERE m.queue = q.queue AND m.state = 'PROCESSING' AND m.lease_expires_at < statement_timestamp()
    ORDER BY m.lease_expires_at LIMIT :limit FOR UPDATE SKIP LOCKED) x
  LIMIT :limit
)
UPDATE {message} m
SET state = CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING m.id
"""


def _array(name: str, item: Any) -> Any:
    return bindparam(name, type_=ARRAY(item))


class PostgresqlDialect(Dialect):
    """All SQL for PostgreSQL ≥ 13."""

    name = "postgresql"
    isolation_level = "READ COMMITTED"
    can_listen = True

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        """Prepare the statements of `tables`."""
        super().__init__(tables, sqlalchemy_dialect)
        add, literal = self._statement, "'" + self.names["message"].replace("'", "''") + "'"
        new = (
            _array("queues", String), _array("payloads", LargeBinary), _array("headers", Text),
            _array("priorities", SmallInteger), _array("keys", String), _array("dedup_ids", String),
            _array("delays", Float(53)), _array("times", DateTime(timezone=True)),
            _array("expiries", Float(53)),
        )  # fmt: skip
        add("insert", _INSERT, *new, message_literal=literal, conflict="")
        add(
            "insert_dedup", _INSERT, *new, message_literal=literal,
            conflict="ON CONFLICT (queue, dedup_id) DO NOTHING",
        )  # fmt: skip
        queues, lease = _array("queues", String), bindparam("lease", type_=Float(53))
        ids, tokens = _array("ids", BigInteger), _array("tokens", Uuid)
        limit = bindparam("limit", type_=Integer)
        add("ready_pairs", _PAIRS, queues)
        columns = ", ".join("m." + (self.names["key"] if c == "key" else c) for c in CLAIMED_COLUMNS)
        add(
            "claim", _CLAIM, queues, _array("priorities", SmallInteger), limit, lease,
            bindparam("token", type_=Uuid()),
            columns=columns.replace("m.headers", "m.headers::text"),
        )  # fmt: skip
        add("renew", _RENEW, ids, tokens, lease)
        add("held", _HELD, ids, tokens)
        ended = (
            ids, tokens, _array("states", String), _array("attempts", Integer), _array("charges", Integer),
            _array("ends", Float(53)), _array("errors", Text),
        )  # fmt: skip
        if self.has_archive:
            kept = MESSAGE_COLUMNS.format(key=self.names["key"])
            add("archive", _ARCHIVE, *ended, _array("reasons", String), columns=kept)
        add("delete", _DELETE, ids, tokens)
        add("update", _UPDATE, *ended, _array("delays", Float(53)), queues, _array("payloads", LargeBinary))
        add("release_stuck", _RELEASE, queues, limit)
        add("now", "SELECT statement_timestamp()")
        add("notify", "SELECT pg_notify(:channel, q) FROM unnest(:queues) AS q", queues)

    def is_transient(self, error: BaseException) -> bool:
        """Classes 08, 40, 53 and the server's shutdown, by SQLSTATE."""
        code = str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")
        return code[:2] in {"08", "40", "53"} or code in {
            "55P03",
            "57014",
            "57P01",
            "57P02",
            "57P03",
            "25006",
        }

    def now(self, connection: Connection) -> datetime:
        """The server's clock."""
        value: datetime = connection.execute(self.sql["now"]).scalar_one()
        return value

    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """One statement; ids are drawn in it, so that they are known row by row."""
        dedup = any(row.dedup_id is not None for row in rows)
        result = connection.execute(
            self.sql["insert_dedup" if dedup else "insert"],
            {
                "queues": [r.queue for r in rows],
                "payloads": [r.payload for r in rows],
                "headers": [r.headers for r in rows],
                "priorities": [r.priority for r in rows],
                "keys": [r.key for r in rows],
                "dedup_ids": [r.dedup_id for r in rows],
                "delays": [r.delay for r in rows],
                "times": [r.next_attempt_at for r in rows],
                "expiries": [r.expires_in for r in rows],
            },
        )
        return [row[0] for row in result]

    def ready_pairs(self, connection: Connection, queues: Sequence[str]) -> list[ReadyPair]:
        """A loose index scan: one step a pair, whatever the number of rows."""
        rows = connection.execute(self.sql["ready_pairs"], {"queues": list(queues)})
        return [ReadyPair(*row) for row in rows]

    def claim(
        self, connection: Connection, pairs: Sequence[ReadyPair], limit: int, lease: float, token: UUID
    ) -> list[ClaimedMessage]:
        """One statement; pairs are walked lazily until `limit` rows are found."""
        rows = connection.execute(
            self.sql["claim"],
            {
                "queues": [p.queue for p in pairs],
                "priorities": [p.priority for p in pairs],
                "limit": limit,
                "lease": lease,
                "token": token,
            },
        )
        rank = {(p.queue, p.priority): n for n, p in enumerate(pairs)}
        # RETURNING has no order.
        return sorted(
            self.claimed(rows, token), key=lambda m: (rank[m.queue, m.priority], m.next_attempt_at, m.id)
        )

    def renew(self, connection: Connection, leases: Sequence[tuple[int, UUID]], lease: float) -> set[int]:
        """Locked rows are skipped by the update and looked up without a lock."""
        binds = _pairs(leases)
        held = {r[0] for r in connection.execute(self.sql["renew"], {**binds, "lease": lease})}
        if len(held) < len(leases):
            held |= {r[0] for r in connection.execute(self.sql["held"], binds)}
        return held

    def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        """At most three statements: archived, deleted, updated rows."""
        archived = [s for s in settlements if s.leaves and s.archive and self.has_archive]
        deleted = [s for s in settlements if s.leaves and not (s.archive and self.has_archive)]
        updated = [s for s in settlements if not s.leaves]
        settled: set[int] = set()
        if archived:
            binds = {**_ended(archived), "reasons": [s.reason for s in archived]}
            settled |= {r[0] for r in connection.execute(self.sql["archive"], binds)}
        if deleted:
            binds = _pairs([(s.id, s.lease_token) for s in deleted])
            settled |= {r[0] for r in connection.execute(self.sql["delete"], binds)}
        if updated:
            binds = {
                **_ended(updated),
                "delays": [s.delay for s in updated],
                "queues": [s.queue for s in updated],
                "payloads": [s.payload for s in updated],
            }
            settled |= {r[0] for r in connection.execute(self.sql["update"], binds)}
        return SettleResult(settled, {s.id for s in settlements} - settled)

    def release_stuck(self, connection: Connection, queues: Sequence[str], limit: int) -> int:
        """One statement; rows locked elsewhere are skipped."""
        binds = {"queues": list(queues), "limit": limit}
        return len(connection.execute(self.sql["release_stuck"], binds).all())

    def notify(self, connection: Connection, channel: str, queues: Sequence[str]) -> None:
        """Send one wake-up for each queue on `channel`."""
        connection.execute(self.sql["notify"], {"channel": channel, "queues": list(queues)})


def _pairs(leases: Sequence[tuple[int, UUID]]) -> dict[str, list[Any]]:
    return {"ids": [i for i, _ in leases], "tokens": [t for _, t in leases]}


def _ended(settlements: Sequence[Settlement]) -> dict[str, list[Any]]:
    return {
        "ids": [s.id for s in settlements],
        "tokens": [s.lease_token for s in settlements],
        "states": [s.state and s.state.name for s in settlements],
        "attempts": [int(s.attempted) for s in settlements],
        "charges": [-int(s.uncharge) for s in settlements],
        "ends": [s.ended_after for s in settlements],
        "errors": [s.error for s in settlements],
    }
