-- variants: by_header, others, others by_header
-- :queue varchar :priority smallint :mask smallint :size int :final int :losses int
-- Reads the oldest due messages of a queue and a priority, each with the first live message of its
-- key: the head, which alone may be claimed in order.
-- others skips suspects, the messages that may have killed their process.
-- States are literals: with bound ones a generic plan could not use the partial index.
WITH w AS (
  SELECT m.id, m.{key_column} AS k, m.next_attempt_at AS due, \
    CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END AS expired
  FROM {message} m 
  WHERE m.queue = :queue AND m.priority = :priority \
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    AND (m.policy_marks & :mask) >= :mask
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  ORDER BY m.next_attempt_at, m.id LIMIT :size
-- Materialized: else PostgreSQL would look for the heads of all keys again for each message.
), h AS MATERIALIZED (
  -- An expired message blocks no other: it will not be handled.
  SELECT k.k, (SELECT e.id FROM {message} e 
  WHERE e.queue = :queue AND e.{key_column} = k.k \
    AND (e.expires_at IS NULL OR e.expires_at > statement_timestamp()) \
  ORDER BY e.id LIMIT 1) AS head
  FROM (SELECT DISTINCT w.k FROM w WHERE w.k IS NOT NULL AND w.expired = 0) k
)
SELECT w.id, w.k, w.expired, w.due, h.head
FROM w LEFT JOIN h ON h.k = w.k
ORDER BY w.due, w.id
