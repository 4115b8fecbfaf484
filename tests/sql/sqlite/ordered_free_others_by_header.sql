WITH w AS (
  SELECT m.id, m.policy_key AS k, m.next_attempt_at AS due
  FROM message m INDEXED BY message_ready
  WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
    AND (m.policy_marks & :mask) >= :mask AND (m.next_attempt_at, m.id) > (:due, :id)
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
  ORDER BY m.next_attempt_at, m.id LIMIT :size
)
SELECT w.id, w.due, CASE WHEN w.k IS NULL THEN 1 ELSE 0 END AS free FROM w ORDER BY w.due, w.id
