UPDATE {message}
SET state = 'PROCESSING',
  acquired_at = {now},
  lease_token = :token,
  lease_expires_at = {now} + :lease,
  deliveries_count = deliveries_count + 1
WHERE id IN (
  SELECT m.id FROM json_each(:pairs) p CROSS JOIN {message} m INDEXED BY {ready_index}
  WHERE m.queue = json_extract(p.value, '$[0]') \
    AND m.priority = json_extract(p.value, '$[1]') \
    AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= {now}
  LIMIT :limit)
RETURNING {claimed}
