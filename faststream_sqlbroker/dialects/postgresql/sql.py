"""PostgreSQL's statements, with `{names}` to fill in; tests/sql/postgresql shows them as sent.

Every array is one bind. So the text is the same for every size of a batch, and stays prepared.
States are literals: with a bound state, a generic plan could not use the partial indexes.
"""

INSERT = """
WITH r AS MATERIALIZED (
  SELECT nextval((SELECT pg_get_serial_sequence({message_literal}, 'id')::regclass)) AS id, u.*
  FROM unnest(:queues, :payloads, :headers, :priorities, :keys, :dedup_ids, :delays, :times, \
:expiries)
    WITH ORDINALITY AS u(queue, payload, headers, priority, key, dedup_id, delay, at, expires_in, \
ord)
), i AS (
  INSERT INTO {message}
    (id, queue, payload, headers, priority, {key}, dedup_id, created_at, next_attempt_at, \
expires_at)
  SELECT r.id, r.queue, r.payload, r.headers::jsonb, r.priority, r.key, r.dedup_id, \
statement_timestamp(),
    coalesce(r.at, statement_timestamp() + coalesce(r.delay, 0) * interval '1 second'),
    statement_timestamp() + r.expires_in * interval '1 second'
  FROM r ORDER BY r.ord
  {conflict}
  RETURNING id
)
SELECT i.id FROM r LEFT JOIN i ON i.id = r.id ORDER BY r.ord
"""

_TIMES = """statement_timestamp(),
  coalesce(:at, statement_timestamp() + coalesce(:delay, 0) * interval '1 second'),
  statement_timestamp() + :expires_in * interval '1 second'"""

INSERT_ONE = (
    """
INSERT INTO {message} (queue, payload, headers, priority, {key}, created_at, next_attempt_at, \
expires_at)
VALUES (:queue, :payload, (:headers)::jsonb, :priority, :key, """
    + _TIMES
    + """)
RETURNING id
"""
)

# What is published without options, which nearly all messages are: values that are not bound need
# neither be sent nor worked out.
INSERT_NOW = """
INSERT INTO {message} (queue, payload, headers, priority, created_at, next_attempt_at)
VALUES (:queue, :payload, (:headers)::jsonb, 0, statement_timestamp(), statement_timestamp())
RETURNING id
"""

# The column's default draws the ids after the sort, so the smallest id is the first row's.
# RETURNING promises no order, so the client sorts the ids. SQLAlchemy's insertmanyvalues relies on
# the same.
_MANY_ALIKE = (
    """
INSERT INTO {message} (queue, payload, headers, priority, {key}, created_at, next_attempt_at, \
expires_at)
SELECT :queue, u.payload, (HEADERS)::jsonb, :priority, :key, """
    + _TIMES
    + """
FROM unnest(UNNESTED) WITH ORDINALITY AS u(NAMES, ord) ORDER BY u.ord
RETURNING id
"""
)


def _many_alike(**words: str) -> str:
    text = _MANY_ALIKE
    for word, value in words.items():
        text = text.replace(word, value)
    return text


INSERT_ALIKE = _many_alike(
    UNNESTED=":payloads, :headers", NAMES="payload, headers", HEADERS="u.headers"
)
INSERT_BODIES = _many_alike(UNNESTED=":payloads", NAMES="payload", HEADERS=":headers")
"""Only the bodies differ."""

PAIRS = """
WITH RECURSIVE {sign}p(queue, ord, priority) AS (
  SELECT q.queue, q.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = q.queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM unnest((SELECT :queues)) WITH ORDINALITY AS q(queue, ord){which_queues}
  UNION ALL
  SELECT p.queue, p.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = p.queue AND m.priority < p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
), f AS MATERIALIZED (
  SELECT p.queue, p.ord, p.priority, (
    SELECT m.next_attempt_at FROM {message} m
    WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.next_attempt_at, m.id LIMIT 1) AS due
  FROM p WHERE p.priority IS NOT NULL
)
SELECT f.queue, f.priority, extract(epoch FROM f.due - statement_timestamp())::float8, f.due,
  extract(epoch FROM clock_timestamp() - statement_timestamp())::float8, \
statement_timestamp(){columns}
FROM (SELECT 1) AS at_least_one_row LEFT JOIN f ON true
ORDER BY f.ord, f.priority DESC
"""
"""The sub-select hides the length of the array from the planner. For 1 000 queues it would estimate
100 000 pairs, and compile the query (JIT) each time, for half a second."""

# Uncorrelated, so each is computed once.
LEASES = """,
  (SELECT extract(epoch FROM min(x.ends) - statement_timestamp())::float8
    FROM unnest((SELECT :leased)) AS q(queue)
    CROSS JOIN LATERAL (
      SELECT m.lease_expires_at AS ends FROM {message} m
      WHERE m.queue = q.queue AND m.state = 'PROCESSING'
      ORDER BY m.lease_expires_at LIMIT 1) x)"""
PAUSED = """,
  (SELECT coalesce(array_agg(s.key), ARRAY[]::varchar[]) FROM {policy_state} s
    WHERE s.scope = 'paused' AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp()))"""
CANCELS = """,
  (SELECT coalesce(json_agg(json_build_array(s.key, s.info)), '[]')::text
    FROM {policy_state} s WHERE s.scope = 'cancel')"""
DRAINED = """,
  (SELECT coalesce(array_agg(s.key), ARRAY[]::varchar[]) FROM {policy_state} s
    WHERE s.scope = 'subscriber' AND s.key = ANY(:names) AND s.counter > 0)"""
SIGN_OF_LIFE = """sign AS (
  INSERT INTO {policy_state} AS s (scope, key, info, created_at, lease_expires_at, expires_at)
  SELECT 'subscriber', m.name, m.info::jsonb, statement_timestamp(),
    statement_timestamp() + :lease * interval '1 second',
    statement_timestamp() + :kept * interval '1 second'
  FROM unnest(:names, :infos) AS m(name, info)
  ORDER BY m.name
  ON CONFLICT (scope, key) DO UPDATE
  SET lease_expires_at = excluded.lease_expires_at, expires_at = excluded.expires_at,
    info = CASE WHEN s.key = ANY(:changed) THEN excluded.info ELSE s.info END
), """
"""Data-modifying, so it runs although nothing reads it."""

LEASED = """state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1"""
# By ctid, as joined on id the planner chose a sequential scan at 20 000 rows.
LEASE = f"""
UPDATE {{message}} m
SET {LEASED}
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r{{unsuspected}}))
RETURNING {{columns}}
"""

# Suspects are locked, but not leased. Their ids and counts are returned; all else is NULL.
_LEASE_APART = f""", u AS ({LEASE})
SELECT * FROM u
UNION ALL
SELECT {{told}} FROM r WHERE r.suspect
"""

_DUE = """
WITH r AS MATERIALIZED (
  SELECT x.*
  FROM unnest(:queues, :priorities, :since) WITH ORDINALITY AS p(queue, priority, since, ord)
  CROSS JOIN LATERAL (
    SELECT m.ctid AS c{asked} FROM {message} m
    WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
      AND m.next_attempt_at BETWEEN coalesce(p.since, '-infinity') AND statement_timestamp(){which}
    ORDER BY m.next_attempt_at, m.id LIMIT :limit FOR UPDATE SKIP LOCKED) x
  LIMIT :limit
)"""
# Trap: without fresh statistics the planner takes the index of ready rows, and finds one row of a
# deep queue by reading all of them. No index serves a CASE.
_THESE = """
WITH r AS MATERIALIZED (
  SELECT m.ctid AS c{asked} FROM {message} m
  WHERE m.id = ANY(:ids) AND CASE WHEN m.queue = ANY(:queues)
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    THEN true ELSE false END
  FOR UPDATE SKIP LOCKED
)"""
CLAIM = _DUE + LEASE
CLAIM_APART = _DUE + _LEASE_APART
IS_WAITING = ",\n  m.lease_expires_at < m.acquired_at + :lease * interval '1 second'"
"""What a claim by two lengths also returns: whether the row got the shorter lease."""


def two_lengths(claim: str) -> str:
    """`claim`, which leases only the first `free` rows for `lease` seconds, and the others for
    `waiting`.
    """
    first = "m.ctid = ANY(ARRAY(SELECT r.c FROM r{unsuspected} LIMIT :free))"
    seconds = f"CASE\n    WHEN {first}\n    THEN :lease ELSE :waiting END"
    return claim.replace(":lease", seconds, 1)


CLAIM_IDS = _THESE + LEASE
CLAIM_IDS_APART = _THESE + _LEASE_APART

RENEW = """
WITH r AS MATERIALIZED (
  SELECT m.ctid AS c
  FROM unnest(:ids, :tokens) AS u(id, token) JOIN {message} m ON m.id = u.id \
AND m.lease_token = u.token
  ORDER BY m.id FOR UPDATE OF m SKIP LOCKED
)
UPDATE {message} m
SET lease_expires_at = GREATEST(m.lease_expires_at, \
statement_timestamp() + :lease * interval '1 second')
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING m.id
"""

HELD = """
SELECT m.id FROM unnest(:ids, :tokens) AS u(id, token)
JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
"""

LOCK = HELD + "ORDER BY m.id FOR UPDATE OF m"
MARK = 1936813154
"""First key of the advisory lock that marks a transaction as the broker's: "sqlb" in ASCII. The
second key is the transaction's limit in milliseconds."""
# Other sessions cannot see a session's limit, but they see its locks. The try never waits, even if
# another program uses the key.
_MARK = f"pg_try_advisory_xact_lock_shared({MARK}, rtrim(:limit, 'ms')::int)"
# The shorter of our limit and the one that the administrator or the application has set, where 0
# means none.
_IDLE_LIMIT = f"""set_config('idle_in_transaction_session_timeout',
    CASE WHEN current_setting('idle_in_transaction_session_timeout')::interval
      BETWEEN interval '1 millisecond' AND CAST(:limit AS interval)
    THEN current_setting('idle_in_transaction_session_timeout') ELSE :limit END, true),
  {_MARK}"""
IDLE_LIMIT = "SELECT " + _IDLE_LIMIT
# A connection may keep a plan from a time when the table was empty. It reads the whole table.
# Planning anew costs less than that, and is done only for single messages, which are rare.
IDLE_LIMIT_ANEW = IDLE_LIMIT + ",\n  set_config('plan_cache_mode', 'force_custom_plan', true)"
ALLOW_IDLING = "SELECT set_config('idle_in_transaction_session_timeout', :limit, true), " + _MARK
LOCK_NUMBERED = LOCK.replace(
    "m.id FROM", f"m.id, pg_current_xact_id()::text, statement_timestamp(), {_IDLE_LIMIT}\nFROM", 1
)
# Trap: a crash of the server forgets a transaction of which nothing was written, and gives its
# number to another one. So the number is believed in two cases only. First, the server has not
# crashed since the lock: a crash resets its statistics. Second, the row still has the lock (xmax):
# then the number was written, and is not given out again. A handler's transaction only locks the
# row. One that locks it and then writes it, such as a renewal, leaves its lock in the new version;
# xmin <> xmax keeps that from being taken for ours.
WAS_COMMITTED = """
SELECT CASE WHEN (:number)::text::xid8 >= pg_snapshot_xmax(pg_current_snapshot()) THEN false
  ELSE pg_xact_status((:number)::text::xid8) = 'committed' AND (
    GREATEST(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) < :since
    OR EXISTS (SELECT FROM {message} m
      WHERE m.id = ANY(:ids) AND m.xmax = (:number)::text::xid8::xid AND m.xmin <> m.xmax))
  END
"""
LOCK_FREE = LOCK + " SKIP LOCKED"

ARCHIVE = """
WITH u AS MATERIALIZED (
  SELECT * FROM unnest(:ids, :tokens, :states, :attempts, :charges, :ends, :reasons, :related, \
:errors, :fingerprints)
    AS u(id, token, state, attempts, charge, ended, reason, related_id, error, fingerprint)
), d AS (
  DELETE FROM {message} m USING u WHERE m.id = u.id AND m.lease_token = u.token RETURNING m.*
), a AS (
  INSERT INTO {archive} ({columns}, archived_at, reason, related_id, error_fingerprint)
  SELECT d.id, d.queue, d.priority, d.{key}, d.dedup_id, d.headers, d.payload, u.state,
    d.attempts_count + u.attempts, d.deliveries_count + u.charge, d.publish_count, d.origin_id,
    d.created_at, d.next_attempt_at, d.expires_at,
    coalesce(d.first_attempt_at, d.acquired_at + u.ended * interval '1 second'),
    coalesce(d.acquired_at + u.ended * interval '1 second', d.last_attempt_at),
    d.acquired_at, coalesce(u.error, d.last_error), d.hops, d.policy_key, statement_timestamp(),
    u.reason, u.related_id, u.fingerprint
  FROM d JOIN u ON u.id = d.id AND u.token = d.lease_token
)
SELECT id FROM d
"""

KEEP_ACKED = """a AS (
  INSERT INTO {archive} ({columns}, archived_at)
  SELECT d.id, d.queue, d.priority, d.{key}, d.dedup_id, d.headers, d.payload, 'COMPLETED',
    d.attempts_count + 1, d.deliveries_count, d.publish_count, d.origin_id,
    d.created_at, d.next_attempt_at, d.expires_at, coalesce(d.first_attempt_at, d.ended_at), \
d.ended_at,
    d.acquired_at, d.last_error, d.hops, d.policy_key, statement_timestamp()
  FROM d
)
"""
"""Archives the plain acks `d`, which have `ended_at`."""

# For plain acks, which nearly all outcomes are: a third of the binds, and no second join.
ARCHIVE_ACKED = (
    """
WITH d AS (
  DELETE FROM {message} m
  USING unnest((:ids)::bigint[], (:places)::int[], (:ends)::bigint[]) AS u(id, place, ended)
  WHERE m.id = u.id AND m.lease_token = (:tokens)[u.place]
  RETURNING {of_message}, m.acquired_at + u.ended * interval '1 microsecond' AS ended_at
), """
    + KEEP_ACKED
    + "SELECT id FROM d\n"
)

DELETE = """
DELETE FROM {message} m USING unnest((:ids)::bigint[], (:places)::int[]) AS u(id, place)
WHERE m.id = u.id AND m.lease_token = (:tokens)[u.place]
RETURNING m.id
"""

UPDATE = """
UPDATE {message} m
SET state = coalesce(u.state, CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END),
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  attempts_count = CASE WHEN u.queue IS NULL THEN m.attempts_count + u.attempts ELSE 0 END,
  deliveries_count = CASE WHEN u.queue IS NULL THEN m.deliveries_count + u.charge ELSE 0 END,
  next_attempt_at = CASE WHEN u.delay IS NULL THEN m.next_attempt_at
    ELSE statement_timestamp() + u.delay * interval '1 second' END,
  first_attempt_at = CASE WHEN u.queue IS NULL
    THEN coalesce(m.first_attempt_at, m.acquired_at + u.ended * interval '1 second') END,
  last_attempt_at = CASE WHEN u.queue IS NULL
    THEN coalesce(m.acquired_at + u.ended * interval '1 second', m.last_attempt_at) END,
  last_error = coalesce(u.error, m.last_error), publish_count = m.publish_count + u.published,
  hops = coalesce((m.hops + 1) * u.hop, m.hops),
  policy_marks = CASE WHEN u.queue IS NULL THEN m.policy_marks & {kept_marks} ELSE 0 END,
  queue = coalesce(u.queue, m.queue),
  {key} = CASE WHEN u.new_key IS NULL THEN m.{key} ELSE nullif(u.new_key, '') END,
  dedup_id = CASE WHEN u.queue IS NULL THEN m.dedup_id END,
  payload = coalesce(u.payload, m.payload),
  headers = coalesce(u.headers::jsonb, m.headers)
FROM unnest(:ids, :tokens, :states, :attempts, :charges, :ends, :delays, :errors, :queues, \
:payloads, :headers,
    :published, :hops, :new_keys)
  AS u(id, token, state, attempts, charge, ended, delay, error, queue, payload, headers, \
published, hop, new_key)
WHERE m.id = u.id AND m.lease_token = u.token
RETURNING m.id
"""

INSIDE = "_inside"
"""Suffix of the names of statements that write only inside one given transaction."""


def inside(settle: str) -> str:
    """`settle`, changed to write nothing unless it runs in the transaction `transaction`."""
    fence = "m.lease_token = "
    own = "pg_current_xact_id_if_assigned() = (:transaction)::text::xid8"
    return settle.replace(f"AND {fence}", f"AND {own} AND {fence}", 1)


ANEW = "_anew"
"""Suffix of the names of statements that are planned anew each time."""


ANEW_GUARD = """(SELECT count(*)
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0"""
"""A condition that always holds, with which PostgreSQL never prefers a generic plan.

Without the value of `one` the planner estimates a million rows for the two series, which have one
row each. So the generic plan always seems to cost more than one for the given values.
"""


def anew(settle: str) -> str:
    """`settle`, planned anew each time."""
    fence = "m.lease_token = "
    return settle.replace(f"AND {fence}", f"AND {ANEW_GUARD}\n    AND {fence}", 1)


LEASE_ENDS_IN = """
SELECT extract(epoch FROM min(x.ends) - statement_timestamp())::float8
FROM unnest(:queues) AS q(queue)
CROSS JOIN LATERAL (
  SELECT m.lease_expires_at AS ends FROM {message} m
  WHERE m.queue = q.queue AND m.state = 'PROCESSING'
  ORDER BY m.lease_expires_at LIMIT 1) x
"""
REMOVE = "DELETE FROM {message} m WHERE m.id = ANY(:ids)"
RELEASE_CLAIM = """
UPDATE {message} m
SET state = CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  deliveries_count = m.deliveries_count - 1, acquired_at = NULL, lease_token = NULL, \
lease_expires_at = NULL,
  policy_marks = m.policy_marks & {kept_marks}
WHERE m.queue = ANY(:queues) AND m.state = 'PROCESSING' AND m.lease_token = :token
RETURNING m.id
"""

RELEASE = """
WITH r AS MATERIALIZED (
  SELECT x.c FROM unnest(:queues) AS q(queue)
  CROSS JOIN LATERAL (
    SELECT m.ctid AS c FROM {message} m
    WHERE m.queue = q.queue AND m.state = 'PROCESSING' \
AND m.lease_expires_at < COALESCE(:before, statement_timestamp())
    ORDER BY m.lease_expires_at LIMIT :limit FOR UPDATE SKIP LOCKED) x
  LIMIT :limit
)
UPDATE {message} m
SET state = CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = m.policy_marks & {kept_marks}
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING m.id
"""

ORDERED = {
    "now": "statement_timestamp()",
    "claimable": "m.state IN ('PENDING', 'RETRYABLE')",
    "after": "(m.next_attempt_at, m.id) > (:due, :id)",
    "due_in": "extract(epoch FROM min(m.next_attempt_at) - statement_timestamp())::float8",
    "of_ids": "= ANY(:ids)",
    "materialized": "MATERIALIZED ",
    **dict.fromkeys(
        (
            "ready_hint",
            "key_hint",
            "policy_key_hint",
            "leased_hint",
            "id_hint",
            "open",
            "close",
            "in_index",
            "in_policy_index",
        ),
        "",
    ),
}
"""The fragments that `ordered_sql` is filled with."""
