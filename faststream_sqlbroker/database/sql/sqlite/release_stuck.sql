-- Gives back messages whose lease has ended by `:before`, or by now. It is sent when the first
-- lease of some queues has ended.
UPDATE {message}
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & {kept_marks}
WHERE id IN (SELECT m.id \
  FROM json_each(:queues) q \
  CROSS JOIN {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING'
  -- `:before` leaves out what ends while requests to cancel are looked at: it may be one of them.
  AND m.lease_expires_at < COALESCE(:before, {now}) LIMIT :limit)
RETURNING id
