-- variants: by_header, others, others by_header
-- :queue varchar :priority smallint :mask smallint :size int :final int :losses int
-- Reads the oldest due messages of a queue and priority, each with the first live message of its
-- key. A claim in order begins with it: the search is bounded, however many messages wait behind a
-- key.
WITH w AS (
  SELECT m.id, m.{key_column} AS k, m.next_attempt_at AS due, \
    CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END AS expired
  FROM {message} m INDEXED BY {ready_index}
  WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') \
    AND m.next_attempt_at <= {now}
    AND (m.policy_marks & :mask) >= :mask
    -- The claim skips suspects, as `claim_others` does.
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  ORDER BY m.next_attempt_at, m.id LIMIT :size
), h AS (
  -- An expired message blocks no other: it will not be handled.
  SELECT k.k, (SELECT e.id FROM {message} e INDEXED BY {key_index}
  WHERE e.queue = :queue AND e.{key_column} = k.k \
    AND (e.expires_at IS NULL OR e.expires_at > {now}) \
  ORDER BY e.id LIMIT 1) AS head
  FROM (SELECT DISTINCT w.k FROM w WHERE w.k IS NOT NULL AND w.expired = 0) k
)
-- Keys are read as bytes: text that is not UTF-8 would fail the read.
SELECT w.id, CAST(w.k AS BLOB), w.expired, w.due, h.head
FROM w LEFT JOIN h ON h.k = w.k
ORDER BY w.due, w.id
