SELECT id, queue, CAST(payload AS BLOB) AS payload, CAST(headers AS BLOB) AS headers, priority, CAST("key" AS BLOB) AS "key", attempts_count, deliveries_count, publish_count, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) AS acquired_at, hops
FROM message m INDEXED BY message_ready
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
LIMIT 500
