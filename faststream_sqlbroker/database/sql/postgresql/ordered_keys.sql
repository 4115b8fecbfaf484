-- :queue varchar :start varchar :size int
-- Reads a page of a queue's keys, from `start` on, with the first live message of each. It is sent
-- where the window (`ordered_window`) was full and gave too few heads.
-- The recursion is a step from key to key in the index, however many messages a key has.
WITH RECURSIVE k(k, n) AS (
  SELECT (SELECT m.key FROM {message} m 
    WHERE m.queue = :queue AND m.key >= :start ORDER BY m.queue, m.key LIMIT 1), 1
  UNION ALL
  SELECT (SELECT m.key FROM {message} m 
    WHERE m.queue = :queue AND m.key > k.k ORDER BY m.queue, m.key LIMIT 1), k.n + 1
  FROM k WHERE k.k IS NOT NULL AND k.n < :size
)
-- An expired message blocks no other: it will not be handled.
SELECT k.k, (SELECT e.id FROM {message} e 
  WHERE e.queue = :queue AND e.key = k.k \
    AND (e.expires_at IS NULL OR e.expires_at > statement_timestamp()) \
  ORDER BY e.id LIMIT 1) AS head
FROM k WHERE k.k IS NOT NULL ORDER BY k.n
