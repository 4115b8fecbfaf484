-- :queue varchar :rows text
-- Reads the first live message of some keys, for `broker.admin.policies`: what is due behind it
-- waits.
-- It is one row of the index for each key: no database makes a join of a subquery with a limit.
-- Keys are read as bytes: text that is not UTF-8 would fail the read.
SELECT CAST(u.k AS BLOB), (
  SELECT e.id FROM {message} e INDEXED BY {key_index}
  WHERE e.queue = :queue AND e."key" = u.k
    AND (e.expires_at IS NULL OR e.expires_at > {now})
  ORDER BY queue, "key", e.id LIMIT 1
) FROM (SELECT json_extract(value, '$.k') AS k FROM json_each(:rows)) u
