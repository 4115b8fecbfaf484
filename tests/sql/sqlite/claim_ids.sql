UPDATE message
SET state = 'PROCESSING', acquired_at = (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000), lease_token = :token, lease_expires_at = (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) + :lease,
  deliveries_count = deliveries_count + 1
WHERE id IN (
  SELECT id FROM message 
  WHERE id IN (__[POSTCOMPILE_ids]) AND queue IN (__[POSTCOMPILE_queues]) AND state IN ('PENDING', 'RETRYABLE')
    AND next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
  ORDER BY next_attempt_at, id LIMIT :limit)
RETURNING id, queue, CAST(payload AS BLOB) AS payload, CAST(headers AS BLOB) AS headers, priority, CAST("key" AS BLOB) AS "key", attempts_count, deliveries_count, publish_count, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, acquired_at
