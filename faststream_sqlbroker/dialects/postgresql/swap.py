"""Claims under policies in two statements, each of which commits by itself.

The first reads messages, leases, states and the queue's version from one snapshot. The second
raises the version and leases, but only if the version is still the same. So a claim that has
decided by what is no longer true writes nothing.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import BigInteger, BindParameter, Float, Integer, String, Text, Uuid, bindparam
from sqlalchemy.dialects.postgresql import ARRAY

from faststream_sqlbroker.core.policies.seen import Candidate, Seen, SeenQueue, Swap
from faststream_sqlbroker.core.rows import Claimed
from faststream_sqlbroker.dialects.claimed_rows import CLAIMED_COLUMNS
from faststream_sqlbroker.dialects.postgresql.answers import read_claimed
from faststream_sqlbroker.dialects.suspects import OTHERS

# What is of the queue, and not of a priority, is asked for once, with its first priority.
LOOK = """
WITH RECURSIVE p(queue, ord, priority, is_first) AS (
  SELECT q.queue, q.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = q.queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1), true
  FROM unnest((SELECT :queues)) WITH ORDINALITY AS q(queue, ord)
  UNION ALL
  SELECT p.queue, p.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = p.queue AND m.priority < p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1), false
  FROM p WHERE p.priority IS NOT NULL
), f AS MATERIALIZED (
  SELECT p.*, (
    SELECT m.next_attempt_at FROM {message} m
    WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.next_attempt_at, m.id LIMIT 1) AS due
  FROM p WHERE p.priority IS NOT NULL
)
SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint, f.queue,
  extract(epoch FROM f.due - statement_timestamp())::float8,
  CASE WHEN f.is_first THEN (
    SELECT s.counter FROM {policy_state} s
    WHERE s.scope = 'ordered' AND s.{key} = f.queue) END,
  CASE WHEN f.is_first THEN (
    SELECT count(*) FROM (
      SELECT 1 FROM {message} m
      WHERE m.queue = f.queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL
      LIMIT :most) r) END,
  CASE WHEN f.is_first THEN (
    SELECT json_object_agg(s.scope, s.info)::text
    FROM unnest(:scopes) AS x(scope)
    JOIN {policy_state} s ON s.scope = x.scope || f.queue AND s.{key} = '') END,
  c.ids, c.marks, c.expired, c.keyless, c.deliveries, c.attempts
FROM (SELECT 1) AS at_least_one_row LEFT JOIN f ON true LEFT JOIN LATERAL (
  SELECT array_agg(d.id ORDER BY d.due, d.id) AS ids,
    array_agg(d.marks ORDER BY d.due, d.id) AS marks,
    array_agg(d.expired ORDER BY d.due, d.id) AS expired,
    array_agg(d.keyless ORDER BY d.due, d.id) AS keyless,
    array_agg(d.deliveries ORDER BY d.due, d.id) AS deliveries,
    array_agg(d.attempts ORDER BY d.due, d.id) AS attempts
  FROM (
    SELECT m.id, m.next_attempt_at AS due, m.policy_marks AS marks,
      coalesce(m.expires_at <= statement_timestamp(), false) AS expired,
      m.{key} IS NULL AS keyless, m.deliveries_count AS deliveries, m.attempts_count AS attempts
    FROM {message} m
    WHERE m.queue = f.queue AND m.priority = f.priority AND m.state IN ('PENDING', 'RETRYABLE')
      AND m.next_attempt_at <= statement_timestamp(){which}
    ORDER BY m.next_attempt_at, m.id LIMIT :size) d
) c ON f.due <= statement_timestamp()
ORDER BY f.ord, f.priority DESC
"""

SWAP = """
WITH swap AS (
  UPDATE {policy_state} s SET counter = s.counter + 1
  WHERE s.ctid = (
    SELECT v.ctid FROM {policy_state} v
    WHERE v.scope = 'ordered' AND v.{key} = :queue AND v.counter = :version
    FOR UPDATE SKIP LOCKED)
  RETURNING 1
), kept AS (
  INSERT INTO {policy_state} (scope, {key}, info, expires_at)
  SELECT u.scope, '', u.info::jsonb, timestamptz 'epoch' + u.expires * interval '1 microsecond'
  FROM unnest(:scopes, :infos, :expiries) AS u(scope, info, expires)
  WHERE EXISTS (SELECT 1 FROM swap)
  ON CONFLICT (scope, {key}) DO UPDATE SET info = excluded.info, expires_at = excluded.expires_at
), r AS MATERIALIZED (
  SELECT m.ctid AS c FROM {message} m
  WHERE EXISTS (SELECT 1 FROM swap) AND m.id = ANY(:ids) AND CASE WHEN m.queue = :queue
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    THEN true ELSE false END
  FOR UPDATE SKIP LOCKED
), u AS ({lease})
SELECT * FROM u
UNION ALL
SELECT {nothing} FROM swap
"""
"""The subquery locks the version before the update looks at it: one that was raised since the
snapshot is compared again as it is now, and one that is just being raised counts as raised. Only
then messages are locked, by their ids: see the trap at the claim of rows in `sql`."""

LOCK_QUEUES = """
WITH l AS MATERIALIZED (
  SELECT s.{key} AS queue FROM {policy_state} s
  WHERE s.scope = 'ordered' AND s.{key} = ANY(:queues)
  ORDER BY s.{key} FOR UPDATE SKIP LOCKED
)
UPDATE {policy_state} s SET counter = s.counter + 1
FROM l WHERE s.scope = 'ordered' AND s.{key} = l.queue
RETURNING s.{key}
"""
"""A claim that holds the lock raises the version, too: what the others have read is old by then."""


def swap_statements(lease: str) -> Iterable[tuple[str, str, list[BindParameter[Any]]]]:
    """Name, text and binds of each; `lease` is the update that leases the rows of `r`."""
    queues: BindParameter[Any] = bindparam("queues", type_=ARRAY(String))
    scopes: BindParameter[Any] = bindparam("scopes", type_=ARRAY(String))
    asked: list[BindParameter[Any]] = [
        queues,
        scopes,
        *(bindparam(name, type_=Integer) for name in ("most", "size")),
    ]
    yield "look", LOOK.replace("{which}", ""), asked
    of_others: list[BindParameter[Any]] = [
        *asked,
        *(bindparam(name, type_=Integer) for name in ("losses", "final")),
    ]
    yield "look_others", LOOK.replace("{which}", OTHERS.format(of="m.")), of_others
    written: list[BindParameter[Any]] = [
        bindparam("queue", type_=String),
        bindparam("version", type_=BigInteger),
        bindparam("ids", type_=ARRAY(BigInteger)),
        bindparam("lease", type_=Float(53)),
        bindparam("token", type_=Uuid()),
        scopes,
        bindparam("infos", type_=ARRAY(Text)),
        bindparam("expiries", type_=ARRAY(BigInteger)),
    ]
    nothing = ", ".join("NULL" for _ in CLAIMED_COLUMNS)
    yield "swap", SWAP.replace("{lease}", lease).replace("{nothing}", nothing), written
    yield "lock_queues", LOCK_QUEUES, [queues]


def read_seen(rows: Iterable[Sequence[Any]]) -> Seen:
    """The answer to `LOOK`."""
    seen = Seen(0)
    known: dict[str, SeenQueue] = {}
    for now, queue, due_in, version, running, states, *columns in rows:
        seen.now = now
        if queue is None:
            continue
        if queue not in known:
            infos = {} if states is None else json.loads(states)
            known[queue] = SeenQueue(queue, version, running, infos)
        if due_in > 0:
            seen.waits.append(due_in)
        elif columns[0] is not None:
            seen.queues[queue] = known[queue]
            known[queue].candidates += map(Candidate._make, zip(*columns, strict=True))
    return seen


def swap_binds(swap: Swap) -> dict[str, Any]:
    """What `SWAP` is told."""
    return {
        "queue": swap.queue,
        "version": swap.version,
        "ids": list(swap.ids),
        "lease": swap.lease,
        "token": swap.token,
        "scopes": list(swap.kept),
        "infos": [json.dumps(info) for info, _ in swap.kept.values()],
        "expiries": [expires for _, expires in swap.kept.values()],
    }


def read_swapped(rows: Iterable[Sequence[Any]], swap: Swap) -> Claimed | None:
    """The leased messages, in the order of `swap`; None: the version was another."""
    found = list(rows)
    if not found:
        return None
    rank = {message: n for n, message in enumerate(swap.ids)}
    leased = read_claimed((row for row in found if row[0] is not None), swap.token)
    return Claimed(sorted(leased, key=lambda message: rank[message.id]))
