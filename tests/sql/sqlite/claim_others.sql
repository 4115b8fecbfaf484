UPDATE message
SET state = 'PROCESSING',
  acquired_at = (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000),
  lease_token = :token,
  lease_expires_at = (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) + :lease,
  deliveries_count = deliveries_count + 1
WHERE id IN (
  SELECT m.id FROM json_each(:pairs) p CROSS JOIN message m INDEXED BY message_ready
  WHERE m.queue = json_extract(p.value, '$[0]') AND m.priority = json_extract(p.value, '$[1]') AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
  LIMIT :limit)
RETURNING id, queue, CAST(payload AS BLOB) AS payload, CAST(headers AS BLOB) AS headers, priority, CAST("key" AS BLOB) AS "key", attempts_count, deliveries_count, publish_count, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, acquired_at, hops
