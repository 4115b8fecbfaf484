UPDATE message FORCE INDEX (PRIMARY)
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & 1619
WHERE id IN (__[POSTCOMPILE_ids])
