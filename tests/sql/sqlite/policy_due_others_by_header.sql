SELECT m.id, CAST(m.policy_key AS BLOB), m.next_attempt_at
FROM message m INDEXED BY message_ready
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
  AND m.next_attempt_at <= :now AND (m.policy_marks & :before) >= :before
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
ORDER BY m.next_attempt_at, m.id LIMIT :size
