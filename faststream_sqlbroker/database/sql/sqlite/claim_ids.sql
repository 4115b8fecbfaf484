-- :ids in :queues in
-- Leases those of some messages that are due in one of the queues. It is sent by claims that have
-- chosen messages before: of one message, in order, or under policies.
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
-- `{claimed}` casts body, headers and key to BLOB: a column holds whatever was put there, and text
-- that is no UTF-8 would make the whole answer unreadable.
RETURNING {claimed}
