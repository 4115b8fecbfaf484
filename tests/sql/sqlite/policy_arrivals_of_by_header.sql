SELECT m.id, CAST(m.policy_key AS BLOB), m.next_attempt_at, MIN(m.created_at, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)),
  CASE WHEN m.expires_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) THEN 1 ELSE 0 END, m.attempts_count + m.deliveries_count + (m.policy_marks & 16), m.policy_marks, u.n
FROM (SELECT json_extract(value, '$.n') AS n, json_extract(value, '$.k') AS k FROM json_each(:rows)) u CROSS JOIN message m INDEXED BY message_policy_key ON m.queue = :queue AND m.policy_key = u.k
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY u.n, m.next_attempt_at, m.id LIMIT :size
