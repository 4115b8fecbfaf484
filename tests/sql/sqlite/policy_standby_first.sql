SELECT m.id, CAST(m."key" AS BLOB), m.next_attempt_at,
  CASE WHEN m.expires_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) THEN 1 ELSE 0 END, MIN(m.created_at, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)), u.n
FROM (SELECT json_extract(value, '$.n') AS n, json_extract(value, '$.k') AS k, json_extract(value, '$.low') AS low, json_extract(value, '$.high') AS high FROM json_each(:rows)) u CROSS JOIN message m INDEXED BY message_key ON m.queue = :queue AND m."key" IN (u.k, CAST(u.k AS BLOB)) AND m.id > u.low AND m.id < u.high
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at >= 220898707200000000 AND (m.policy_marks & 256) > 0 THEN 1 ELSE 0 END = 1
ORDER BY u.n, m.id LIMIT :size
