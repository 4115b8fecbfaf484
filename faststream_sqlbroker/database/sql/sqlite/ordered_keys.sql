-- :queue varchar :start varchar :size int
-- Reads a page of a queue's keys, each with its first live message: if the window of
-- `ordered_window` was full and gave too few heads, and to tell whether one message is the head of
-- its key.
WITH RECURSIVE k(k, n) AS (
  -- From each key to the next, by one step in the index.
  SELECT (SELECT m."key" FROM {message} m INDEXED BY {key_index}
    WHERE m.queue = :queue AND m."key" >= :start ORDER BY m.queue, m."key" LIMIT 1), 1
  UNION ALL
  SELECT (SELECT m."key" FROM {message} m INDEXED BY {key_index}
    WHERE m.queue = :queue AND m."key" > k.k ORDER BY m.queue, m."key" LIMIT 1), k.n + 1
  FROM k WHERE k.k IS NOT NULL AND k.n < :size
)
-- Keys are read as bytes: text that is not UTF-8 would fail the read.
-- An expired message blocks no other: it will not be handled.
SELECT CAST(k.k AS BLOB), (SELECT e.id FROM {message} e INDEXED BY {key_index}
  WHERE e.queue = :queue AND e."key" = k.k AND (e.expires_at IS NULL OR e.expires_at > {now}) \
  ORDER BY e.id LIMIT 1) AS head
FROM k WHERE k.k IS NOT NULL ORDER BY k.n
