-- :ids in :queues in
UPDATE {message}
SET state = CASE WHEN (deliveries_count = :final
      OR deliveries_count < :final AND deliveries_count - attempts_count >= :losses)
    THEN state ELSE 'PROCESSING' END,
  acquired_at = CASE WHEN (deliveries_count = :final
      OR deliveries_count < :final AND deliveries_count - attempts_count >= :losses)
    THEN NULL ELSE {now} END,
  lease_token = CASE WHEN (deliveries_count = :final
      OR deliveries_count < :final AND deliveries_count - attempts_count >= :losses)
    THEN lease_token ELSE :token END,
  lease_expires_at = CASE WHEN (deliveries_count = :final
      OR deliveries_count < :final AND deliveries_count - attempts_count >= :losses)
    THEN lease_expires_at ELSE {now} + :lease END,
  deliveries_count = CASE WHEN (deliveries_count = :final
      OR deliveries_count < :final AND deliveries_count - attempts_count >= :losses)
    THEN deliveries_count ELSE deliveries_count + 1 END
WHERE id IN (
  SELECT m.id FROM {message} m
  WHERE m.id IN :ids AND m.queue IN :queues AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= {now}
  LIMIT :limit)
RETURNING {claimed}
