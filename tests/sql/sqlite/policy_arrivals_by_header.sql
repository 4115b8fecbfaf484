SELECT m.id, CAST(m.policy_key AS BLOB), m.next_attempt_at, MIN(m.created_at, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)),
  CASE WHEN m.expires_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) THEN 1 ELSE 0 END, m.attempts_count + m.deliveries_count + (m.policy_marks & 16), m.policy_marks
FROM message m INDEXED BY message_ready
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
  AND m.next_attempt_at >= :since AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY m.next_attempt_at, m.id LIMIT :size
