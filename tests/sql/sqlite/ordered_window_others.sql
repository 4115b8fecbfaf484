SELECT w.id, CAST(w."key" AS BLOB), (SELECT e.id FROM message e INDEXED BY message_key
  WHERE e.queue = :queue AND e."key" = w."key" AND (e.expires_at IS NULL OR e.expires_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)) ORDER BY e.id LIMIT 1) AS head
FROM (
  SELECT m.id, m."key", m.next_attempt_at FROM message m INDEXED BY message_ready
  WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
    AND m.deliveries_count - m.attempts_count < 2
  ORDER BY m.next_attempt_at, m.id LIMIT :size) w
ORDER BY w.next_attempt_at, w.id
