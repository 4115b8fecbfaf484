SELECT CAST(u.k AS BLOB), (
  SELECT e.id FROM message e INDEXED BY message_key
  WHERE e.queue = :queue AND e."key" = u.k
    AND (e.expires_at IS NULL OR e.expires_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000))
  ORDER BY queue, "key", e.id LIMIT 1
) FROM (SELECT json_extract(value, '$.k') AS k FROM json_each(:rows)) u
