-- variants: by_header
-- :queue varchar :start varchar :size int :mask smallint
-- Reads a page of a queue's keys, each with its first message that can be claimed, whatever comes
-- before it. It is sent if the window of `ordered_window` was full and gave too few, where a key
-- may have several leases.
WITH RECURSIVE k(k, n) AS (
  -- From each key to the next, by one step in the index.
  SELECT (SELECT m.{key_column} FROM {message} m INDEXED BY {key_index}
    WHERE m.queue = :queue AND m.{key_column} >= :start \
    ORDER BY m.queue, m.{key_column} LIMIT 1), 1
  UNION ALL
  SELECT (SELECT m.{key_column} FROM {message} m INDEXED BY {key_index}
    WHERE m.queue = :queue AND m.{key_column} > k.k \
    ORDER BY m.queue, m.{key_column} LIMIT 1), k.n + 1
  FROM k WHERE k.k IS NOT NULL AND k.n < :size
)
-- Keys are read as bytes: text that is not UTF-8 would fail the read.
SELECT CAST(k.k AS BLOB), (SELECT m.id FROM {message} m INDEXED BY {key_index}
  WHERE m.queue = :queue AND m.{key_column} = k.k \
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= {now}
    AND (m.policy_marks & :mask) >= :mask \
  ORDER BY m.id LIMIT 1) AS head
FROM k WHERE k.k IS NOT NULL ORDER BY k.n
