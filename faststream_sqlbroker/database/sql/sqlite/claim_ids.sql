-- :ids in :queues in
UPDATE {message}
SET state = 'PROCESSING',
  acquired_at = {now},
  lease_token = :token,
  lease_expires_at = {now} + :lease,
  deliveries_count = deliveries_count + 1
WHERE id IN (
  SELECT m.id FROM {message} m
  WHERE m.id IN :ids AND m.queue IN :queues AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= {now}
  LIMIT :limit)
RETURNING {claimed}
