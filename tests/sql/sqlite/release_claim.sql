UPDATE message
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & 32755, deliveries_count = deliveries_count - 1
WHERE queue = :queue AND state = 'PROCESSING' AND lease_token = :token
RETURNING id
