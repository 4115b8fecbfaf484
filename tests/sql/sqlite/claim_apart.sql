UPDATE message
SET state = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN state ELSE 'PROCESSING' END,
  acquired_at = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN NULL ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) END,
  lease_token = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN lease_token ELSE :token END,
  lease_expires_at = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN lease_expires_at ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) + :lease END,
  deliveries_count = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN deliveries_count ELSE deliveries_count + 1 END
WHERE id IN (
  SELECT m.id FROM json_each(:pairs) p CROSS JOIN message m INDEXED BY message_ready
  WHERE m.queue = json_extract(p.value, '$[0]') AND m.priority = json_extract(p.value, '$[1]') AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
  LIMIT :limit)
RETURNING id, queue, CAST(payload AS BLOB) AS payload, CAST(headers AS BLOB) AS headers, priority, CAST("key" AS BLOB) AS "key", attempts_count, deliveries_count, publish_count, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, acquired_at, hops
