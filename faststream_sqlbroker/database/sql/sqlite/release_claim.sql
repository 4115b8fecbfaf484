-- Gives back what a claim has leased, without a charge: its answer was lost, or its caller was
-- cancelled.
UPDATE {message}
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & {kept_marks}, deliveries_count = deliveries_count - 1
WHERE id IN (SELECT m.id \
  FROM json_each(:queues) q \
  CROSS JOIN {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING' AND m.lease_token = :token)
RETURNING id
