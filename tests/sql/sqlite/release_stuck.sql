UPDATE message
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & 32755
WHERE id IN (SELECT id FROM message INDEXED BY message_leased
  WHERE queue = :queue AND state = 'PROCESSING' AND lease_expires_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
  ORDER BY lease_expires_at LIMIT :limit)
RETURNING id
