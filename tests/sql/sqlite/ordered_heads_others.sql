SELECT m.id, CAST(m."key" AS BLOB) FROM message m 
WHERE m.id IN (__[POSTCOMPILE_ids]) AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
  AND (m.policy_marks & :mask) >= :mask
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final THEN 1 ELSE 0 END = 1
ORDER BY m.priority DESC, m.next_attempt_at, m.id
