-- :ids in :queues in
-- Leases as `claim_ids` does, but no suspects. They stay as they are, and are told by an
-- `acquired_at` of NULL. It is sent by claims that know suspects, told or not.
-- A suspect has lost `:losses` leases or more: deliveries that ended without an attempt. Beyond
-- `:final` it is none: it ends without a handler.
UPDATE {message}
SET state = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN state ELSE 'PROCESSING' END,
  acquired_at = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN NULL ELSE {now} END,
  lease_token = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN lease_token ELSE :token END,
  lease_expires_at = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN lease_expires_at ELSE {now} + :lease END,
  deliveries_count = CASE WHEN deliveries_count - attempts_count BETWEEN :losses AND :final
    THEN deliveries_count ELSE deliveries_count + 1 END
WHERE id IN (
  SELECT m.id FROM {message} m
  WHERE m.id IN :ids AND m.queue IN :queues AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= {now}
  LIMIT :limit)
-- `{claimed}` casts body, headers and key to BLOB: a column holds whatever was put there, and text
-- that is no UTF-8 would make the whole answer unreadable.
RETURNING {claimed}
