UPDATE message
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & 1619
WHERE id IN (SELECT m.id FROM json_each(:queues) q CROSS JOIN message m INDEXED BY message_leased
  WHERE m.queue = q.value AND m.state = 'PROCESSING'
  AND m.lease_expires_at < COALESCE(:before, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)) LIMIT :limit)
RETURNING id
