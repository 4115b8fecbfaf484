-- variants: by_header, others, others by_header
-- :queue varchar :priority smallint :mask smallint :size int :final int :losses int
-- Reads the oldest due messages of a queue and priority, each with the first live one of its key.
-- Each claim in order or by key sends it first: however many messages wait behind a busy key, the
-- search is bounded. Only if the window was full and gave too few, other statements follow.
-- The index is named so that the scan uses it; `claimable`, which leads it, is 1 or NULL.
WITH w AS (
  SELECT m.id, m.{key_column} AS k, m.next_attempt_at AS due, \
    CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END AS expired
  FROM {message} m FORCE INDEX ({ready_index})
  WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 \
    AND m.next_attempt_at <= UTC_TIMESTAMP(6)
    AND (m.policy_marks & :mask) >= :mask
    -- `others` skips suspects: they may have killed their process, or are on their last delivery.
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  ORDER BY m.next_attempt_at, m.id LIMIT :size
), h AS (
  -- The first live message, not whether there is an earlier one: for a first message MariaDB would
  -- read its whole key to say no. An expired message blocks no other: it will not be handled.
  -- MySQL's text also orders by the first columns of the index. MariaDB needs the id only.
  SELECT k.k, \
    (SELECT e.id FROM {message} e FORCE INDEX ({key_index})
  WHERE e.queue = :queue AND e.{key_column} = k.k \
    AND (e.expires_at IS NULL OR e.expires_at > UTC_TIMESTAMP(6)) \
  ORDER BY e.id LIMIT 1) AS head
  FROM (SELECT DISTINCT w.k FROM w WHERE w.k IS NOT NULL AND w.expired = 0) k
)
SELECT w.id, w.k, w.expired, w.due, h.head
FROM w LEFT JOIN h ON h.k = w.k
ORDER BY w.due, w.id
