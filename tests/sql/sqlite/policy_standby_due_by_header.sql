SELECT m.id, CAST(m.policy_key AS BLOB), m.next_attempt_at,
  CASE WHEN m.expires_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) THEN 1 ELSE 0 END, MIN(m.created_at, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000))
FROM message m INDEXED BY message_ready
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at >= 220898707200000000 AND (m.policy_marks & 256) > 0
  AND m.next_attempt_at <= :now
ORDER BY m.next_attempt_at, m.id LIMIT :size
