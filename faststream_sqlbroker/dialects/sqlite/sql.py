"""SQLite's statements, with `{names}` to fill in; tests/sql/sqlite shows them as sent."""

from datetime import datetime, timezone

from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.dialects.suspects import SUSPECT

NOW = "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"
"""The clock of SQLite has milliseconds; it stands still within one statement."""

FIRST_MOMENT = to_microseconds(datetime.min.replace(tzinfo=timezone.utc))
LAST_MOMENT = to_microseconds(datetime.max.replace(tzinfo=timezone.utc))
"""The years 1 to 9999, which Python knows. Text and bytes, which any column takes, sort after all
numbers."""
INSERT_ROW = (
    "(:queue_{n}, :payload_{n}, :headers_{n}, :priority_{n}, :key_{n}, :dedup_id_{n}, "
    f"{NOW}, COALESCE(:at_{{n}}, {NOW} + :delay_{{n}}), {NOW} + :expires_{{n}})"
)

_CLAIMABLE = "m.state IN ('PENDING', 'RETRYABLE')"
_LEASED = {
    "state": "'PROCESSING'",
    "acquired_at": "{now}",
    "lease_token": ":token",
    "lease_expires_at": "{now} + :lease",
    "deliveries_count": "deliveries_count + 1",
}
_CLAIM_SETTING = """
UPDATE {message}
SET $SET
WHERE id IN (
  SELECT m.id FROM {source}
  WHERE {of} AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= {now}{which}
  LIMIT :limit)
RETURNING {columns}
"""

CLAIM = _CLAIM_SETTING.replace(
    "$SET", ",\n  ".join(f"{name} = {value}" for name, value in _LEASED.items())
)
# Suspects stay as they are, and are told by an acquired_at of NULL.
CLAIM_APART = _CLAIM_SETTING.replace(
    "$SET",
    ",\n  ".join(
        f"{name} = CASE WHEN {SUSPECT.format(of='')}\n"
        f"    THEN {'NULL' if name == 'acquired_at' else name} ELSE {value} END"
        for name, value in _LEASED.items()
    ),
)

# CROSS JOIN keeps the order of the pairs, the index that of their rows: nothing behind the limit is
# read, which ORDER BY, not knowing either, would read and sort.
DUE = {
    "source": "json_each(:pairs) p CROSS JOIN {message} m INDEXED BY {ready_index}",
    "of": "m.queue = json_extract(p.value, '$[0]') AND m.priority = json_extract(p.value, '$[1]')",
}
THESE = {"source": "{message} m", "of": "m.id IN :ids AND m.queue IN :queues"}

_READY = "FROM {message} m INDEXED BY {ready_index}\n    WHERE " + _CLAIMABLE
PAIRS = (
    """
WITH RECURSIVE p(place, queue, priority) AS (
  SELECT q.key, q.queue, (SELECT m.priority """
    + _READY
    + """ AND m.queue = q.queue
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM (SELECT key, value AS queue FROM json_each(:queues)) q{which_queues}
  UNION ALL
  SELECT p.place, p.queue, (SELECT m.priority """
    + _READY
    + """ AND m.queue = p.queue AND m.priority < p.priority
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
)
SELECT p.queue, p.priority, ((SELECT m.next_attempt_at """
    + _READY
    + """ AND m.queue = p.queue AND m.priority = p.priority
    ORDER BY m.next_attempt_at LIMIT 1) - {now}) / 1000000.0,
  EXISTS (SELECT 1 """
    + _READY
    + """ AND m.queue = p.queue AND m.priority = p.priority AND m.next_attempt_at > {last})
  OR EXISTS (SELECT 1 """
    + _READY
    + """ AND m.queue = p.queue AND m.priority = p.priority AND m.next_attempt_at < {first})
FROM p WHERE p.priority IS NOT NULL ORDER BY p.place, p.priority DESC
"""
)

_ROWS = """(SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS state,
  json_extract(value, '$[2]') AS attempts, json_extract(value, '$[3]') AS charge,
  json_extract(value, '$[4]') AS ended, json_extract(value, '$[5]') AS reason,
  json_extract(value, '$[6]') AS error, json_extract(value, '$[7]') AS delay,
  json_extract(value, '$[8]') AS queue, json_extract(value, '$[9]') AS related_id,
  json_extract(value, '$[10]') AS published, json_extract(value, '$[11]') AS hop,
  json_extract(value, '$[12]') AS fingerprint, json_extract(value, '$[13]') AS new_key
  FROM json_each(:rows)) u"""

ARCHIVE = (
    """
INSERT INTO {archive} ({columns}, archived_at, reason, related_id, error_fingerprint)
SELECT m.id, m.queue, m.priority, m.{key}, m.dedup_id, m.headers, m.payload, u.state,
  m.attempts_count + u.attempts, m.deliveries_count + u.charge, m.publish_count, m.origin_id,
  m.created_at, m.next_attempt_at, m.expires_at,
  COALESCE(m.first_attempt_at, m.acquired_at + u.ended), \
COALESCE(m.acquired_at + u.ended, m.last_attempt_at),
  m.acquired_at, COALESCE(u.error, m.last_error), m.hops, m.policy_key, {now}, u.reason, \
u.related_id, u.fingerprint
FROM """
    + _ROWS
    + """
CROSS JOIN {message} m ON m.id = u.id
"""
)

_UPDATE = (
    """
UPDATE {message}
SET state = COALESCE(u.state,
    CASE WHEN {message}.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END),
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  attempts_count = CASE WHEN u.queue IS NULL THEN attempts_count + u.attempts ELSE 0 END,
  deliveries_count = CASE WHEN u.queue IS NULL THEN deliveries_count + u.charge ELSE 0 END,
  next_attempt_at = CASE WHEN u.delay IS NULL THEN next_attempt_at ELSE {now} + u.delay END,
  first_attempt_at = CASE WHEN u.queue IS NULL \
THEN COALESCE(first_attempt_at, acquired_at + u.ended) END,
  last_attempt_at = CASE WHEN u.queue IS NULL \
THEN COALESCE(acquired_at + u.ended, last_attempt_at) END,
  last_error = COALESCE(u.error, last_error), publish_count = publish_count + u.published,
  hops = COALESCE((hops + 1) * u.hop, hops),
  policy_marks = CASE WHEN u.queue IS NULL THEN policy_marks & {kept_marks} ELSE 0 END,
  queue = COALESCE(u.queue, {message}.queue),
  {key} = CASE WHEN u.new_key IS NULL THEN {message}.{key} ELSE NULLIF(u.new_key, '') END,
  dedup_id = CASE WHEN u.queue IS NULL THEN dedup_id END
FROM """
    + _ROWS
    + """
WHERE {message}.id = u.id
"""
)


_GIVEN_BACK = """
UPDATE {message}
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & {kept_marks}"""

# As bytes: text that is no UTF-8 would make the whole answer unreadable.
_OF_PAIRS = f"""SELECT m.id, m.queue, CAST(m.next_attempt_at AS BLOB)
FROM json_each(:pairs) p CROSS JOIN {{message}} m INDEXED BY {{ready_index}}
WHERE {DUE["of"]} AND {_CLAIMABLE} AND m.next_attempt_at"""

PLAIN = {
    "update": _UPDATE,
    "payload": "UPDATE {message} SET payload = :payload WHERE id = :id",
    "headers": "UPDATE {message} SET headers = u.headers\n"
    "FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS headers\n"
    "  FROM json_each(:rows)) u\nWHERE {message}.id = u.id",
    "release_stuck": _GIVEN_BACK
    + """
WHERE id IN (SELECT m.id FROM json_each(:queues) q CROSS JOIN {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING'
  AND m.lease_expires_at < COALESCE(:before, {now}) LIMIT :limit)
RETURNING id
""",
    "lease_ends_in": """
SELECT (MIN((SELECT m.lease_expires_at FROM {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL
  ORDER BY m.queue, m.lease_expires_at LIMIT 1)) - {now}) / 1000000.0
FROM json_each(:queues) q
""",
    "release_claim": _GIVEN_BACK
    + """, deliveries_count = deliveries_count - 1
WHERE id IN (SELECT m.id FROM json_each(:queues) q CROSS JOIN {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING' AND m.lease_token = :token)
RETURNING id
""",
    "now": "SELECT {now}",
    "unusable": f"{_OF_PAIRS} > {{last}}\nUNION ALL\n{_OF_PAIRS} < {{first}}\nLIMIT :limit",
    "mend": "UPDATE {message} SET next_attempt_at = {now} WHERE id = :id",
}
_HELD = "SELECT id, lease_token FROM {message} WHERE id IN :ids"
BY_IDS = {
    "lock": _HELD,
    "lock_free": _HELD,
    "look": _HELD,
    "renew": "UPDATE {message} SET lease_expires_at = max(lease_expires_at, {now} + :lease) "
    "WHERE id IN :ids",
    "delete": "DELETE FROM {message} WHERE id IN :ids",
}

ORDERED = {
    "now": NOW,
    "claimable": "m.state IN ('PENDING', 'RETRYABLE')",
    "after": "(m.next_attempt_at, m.id) > (:due, :id)",
    "due_in": "(MIN(m.next_attempt_at) - " + NOW + ") / 1000000.0",
    "id_hint": "",
    "open": "CAST(",
    "close": " AS BLOB)",
}
