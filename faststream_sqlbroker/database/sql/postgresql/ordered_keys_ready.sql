-- variants: by_header
-- :queue varchar :start varchar :size int :mask smallint
-- Reads a page of a queue's keys, from `start` on, with the first message of each that can be
-- claimed, whatever comes before it.
-- The recursion is a step from key to key in the index, however many messages a key has.
WITH RECURSIVE k(k, n) AS (
  SELECT (SELECT m.{key_column} FROM {message} m 
    WHERE m.queue = :queue AND m.{key_column} >= :start \
    ORDER BY m.queue, m.{key_column} LIMIT 1), 1
  UNION ALL
  SELECT (SELECT m.{key_column} FROM {message} m 
    WHERE m.queue = :queue AND m.{key_column} > k.k \
    ORDER BY m.queue, m.{key_column} LIMIT 1), k.n + 1
  FROM k WHERE k.k IS NOT NULL AND k.n < :size
)
SELECT k.k, (SELECT m.id FROM {message} m 
  WHERE m.queue = :queue AND m.{key_column} = k.k \
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    AND (m.policy_marks & :mask) >= :mask \
  ORDER BY m.id LIMIT 1) AS head
FROM k WHERE k.k IS NOT NULL ORDER BY k.n
