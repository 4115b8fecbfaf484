-- :queues varchar[] :token uuid
-- Gives back, uncharged, what a claim leased with `token`. It is sent when the claim was cancelled
-- or its answer was lost: no worker has what it leased.
-- The state is a literal: with a bound one a generic plan could not use the partial index.
UPDATE {message} m
SET state = CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  deliveries_count = m.deliveries_count - 1, acquired_at = NULL, lease_token = NULL, \
  lease_expires_at = NULL,
  policy_marks = m.policy_marks & {kept_marks}
WHERE m.queue = ANY(:queues) AND m.state = 'PROCESSING' AND m.lease_token = :token
RETURNING m.id
