-- :ids in
UPDATE {message} FORCE INDEX (PRIMARY)
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & {kept_marks}
WHERE id IN :ids
