WITH w AS (
  SELECT m.id, m.policy_key AS k, m.next_attempt_at AS due, CASE WHEN m.expires_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) THEN 1 ELSE 0 END AS expired
  FROM message m INDEXED BY message_ready
  WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
    AND (m.policy_marks & :mask) >= :mask
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
  ORDER BY m.next_attempt_at, m.id LIMIT :size
), h AS (
  SELECT k.k, (SELECT e.id FROM message e INDEXED BY message_policy_key
  WHERE e.queue = :queue AND e.policy_key = k.k AND (e.expires_at IS NULL OR e.expires_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)) ORDER BY e.id LIMIT 1) AS head
  FROM (SELECT DISTINCT w.k FROM w WHERE w.k IS NOT NULL AND w.expired = 0) k
)
SELECT w.id, CAST(w.k AS BLOB), w.expired, w.due, h.head
FROM w LEFT JOIN h ON h.k = w.k
ORDER BY w.due, w.id
