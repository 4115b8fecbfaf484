"""Statements of ordered claims, with `{names}` to fill in; tests/sql shows them filled in."""

_NOT_EXPIRED = "(e.expires_at IS NULL OR e.expires_at > {now})"
"""An expired message blocks no other: it will not be handled."""

_HEAD = (
    """(SELECT e.id FROM {message} e {key_hint}
  WHERE e.queue = :queue AND e.{key} = k.k AND """
    + _NOT_EXPIRED
    + """ ORDER BY {in_index}e.id LIMIT 1) AS head"""
)
"""The first live message of a key; not whether there is an earlier one: for a first message MariaDB
would read its whole key to say no. `in_index` is what MySQL wants to be told of the index's order,
else it sorts the key."""

FIRST_READY = """(SELECT m.id FROM {message} m {key_hint}
  WHERE m.queue = :queue AND m.{key} = k.k AND {claimable} AND m.next_attempt_at <= {now}
    AND (m.policy_marks & :mask) >= :mask ORDER BY {in_index}m.id LIMIT 1) AS head"""
"""The first message of a key that can be claimed, whatever comes before it."""

_DUE = """FROM {message} m {ready_hint}
  WHERE m.queue = :queue AND m.priority = :priority AND {claimable} AND m.next_attempt_at <= {now}
    AND (m.policy_marks & :mask) >= :mask"""

# PostgreSQL would look for the heads of all keys again for each message.
WINDOW = (
    """
WITH w AS (
  SELECT m.id, m.{key} AS k, m.next_attempt_at AS due, CASE WHEN m.expires_at <= {now} \
THEN 1 ELSE 0 END AS expired
  """
    + _DUE
    + """{which}
  ORDER BY m.next_attempt_at, m.id LIMIT :size
), h AS {materialized}(
  SELECT k.k, """
    + _HEAD
    + """
  FROM (SELECT DISTINCT w.k FROM w WHERE w.k IS NOT NULL AND w.expired = 0) k
)
SELECT w.id, {open}w.k{close}, w.expired, w.due, h.head
FROM w LEFT JOIN h ON h.k = w.k
ORDER BY w.due, w.id
"""
)

FREE = (
    """
WITH w AS (
  SELECT m.id, m.{key} AS k, m.next_attempt_at AS due
  """
    + _DUE
    + """ AND {after}{which}
  ORDER BY m.next_attempt_at, m.id LIMIT :size
)
SELECT w.id, w.due, CASE WHEN w.k IS NULL THEN 1 ELSE 0 END AS free FROM w ORDER BY w.due, w.id
"""
)

BUSY = """
SELECT {open}m.{key}{close} FROM {message} m {leased_hint}
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
AND m.{key} IS NOT NULL
"""

KEYS = (
    """
WITH RECURSIVE k(k, n) AS (
  SELECT (SELECT m.{key} FROM {message} m {key_hint}
    WHERE m.queue = :queue AND m.{key} >= :start ORDER BY m.queue, m.{key} LIMIT 1), 1
  UNION ALL
  SELECT (SELECT m.{key} FROM {message} m {key_hint}
    WHERE m.queue = :queue AND m.{key} > k.k ORDER BY m.queue, m.{key} LIMIT 1), k.n + 1
  FROM k WHERE k.k IS NOT NULL AND k.n < :size
)
SELECT {open}k.k{close}, """
    + _HEAD
    + """
FROM k WHERE k.k IS NOT NULL ORDER BY k.n
"""
)

# MySQL and MariaDB search no range from an outer column: the recursion would start at the queue's
# first key each time (3.9 s behind 100 000 messages of one key). This walks the index from `start`
# and stops: 16 ms.
KEYS_WALKED = (
    """
SELECT {open}k.k{close}, """
    + _HEAD
    + """
FROM (SELECT DISTINCT m.{key} AS k FROM {message} m {key_hint}
  WHERE m.queue = :queue AND m.{key} >= :start ORDER BY m.{key} LIMIT :size) k
ORDER BY k.k
"""
)

KEYS_DUE = (
    """
SELECT {open}k.k{close}, """
    + FIRST_READY
    + """
FROM (SELECT p.{key} AS k, p.due_at AS due FROM {policy_state} p
  WHERE p.scope = :scope AND p.due_at <= {now} ORDER BY p.due_at LIMIT :size) k
ORDER BY k.due
"""
)
"""The keys that a policy has something to do for, by the time since when."""

# No index serves a CASE. Trap: without fresh statistics PostgreSQL would find these rows by the
# index of ready ones, and read all of it.
HEADS = """
SELECT m.id, {open}m.{key}{close} FROM {message} m {id_hint}
WHERE m.id {of_ids} AND CASE WHEN {claimable} AND m.next_attempt_at <= {now}
  AND (m.policy_marks & :mask) >= :mask{which} THEN 1 ELSE 0 END = 1
ORDER BY m.priority DESC, m.next_attempt_at, m.id
"""

SOON = """
SELECT {due_in} FROM {message} m {id_hint}
WHERE m.id {of_ids} AND CASE WHEN {claimable} AND m.next_attempt_at > {now}
  THEN 1 ELSE 0 END = 1
"""

ONE = """
SELECT m.queue, {open}m.{key}{close}, CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END
FROM {message} m WHERE m.id = :id
"""


def of_ready(keys: str) -> str:
    """KEYS or KEYS_WALKED with the first message of each key that can be claimed, in place of the
    first that lives.
    """
    return keys.replace(_HEAD, FIRST_READY)


BY_HEADER = "_by_header"
"""The end of the names of statements that go by `policy_key`, in place of the key."""


def by_header(text: str) -> str:
    """The statement `text` with the key that was read from a header, and its index."""
    for alias in ("m", "e"):
        text = text.replace(f"{alias}.{{key}}", f"{alias}.policy_key")
    return (
        text.replace("{key_index}", "{policy_key_index}")
        .replace("{key_hint}", "{policy_key_hint}")
        .replace("{in_index}", "{in_policy_index}")
    )
