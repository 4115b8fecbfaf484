-- :queue varchar :rows text
SELECT CAST(u.k AS BLOB), (
  SELECT e.id FROM {message} e INDEXED BY {key_index}
  WHERE e.queue = :queue AND e."key" = u.k
    AND (e.expires_at IS NULL OR e.expires_at > {now})
  ORDER BY queue, "key", e.id LIMIT 1
) FROM (SELECT json_extract(value, '$.k') AS k FROM json_each(:rows)) u
