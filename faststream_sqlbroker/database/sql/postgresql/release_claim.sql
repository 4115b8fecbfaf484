-- :queues varchar[] :token uuid
UPDATE {message} m
SET state = CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  deliveries_count = m.deliveries_count - 1, acquired_at = NULL, lease_token = NULL, \
    lease_expires_at = NULL,
  policy_marks = m.policy_marks & {kept_marks}
WHERE m.queue = ANY(:queues) AND m.state = 'PROCESSING' AND m.lease_token = :token
RETURNING m.id
