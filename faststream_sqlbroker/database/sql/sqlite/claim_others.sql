-- Leases as `claim` does, but skips suspects. It is sent by claims that do not report them.
UPDATE {message}
SET state = 'PROCESSING',
  acquired_at = {now},
  lease_token = :token,
  lease_expires_at = {now} + :lease,
  deliveries_count = deliveries_count + 1
WHERE id IN (
  -- CROSS JOIN keeps the order of the pairs, the index that of their rows: nothing behind the limit
  -- is read. ORDER BY, which knows of neither, would read and sort it.
  SELECT m.id \
  FROM json_each(:pairs) p \
  CROSS JOIN {message} m INDEXED BY {ready_index}
  WHERE m.queue = json_extract(p.value, '$[0]') \
    AND m.priority = json_extract(p.value, '$[1]') \
    AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= {now}
    -- A suspect has lost `:losses` leases or more: deliveries that ended without an attempt.
    -- Beyond `:final` it is none: it ends without a handler.
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
  LIMIT :limit)
-- `{claimed}` casts body, headers and key to BLOB: a column holds whatever was put there, and text
-- that is no UTF-8 would make the whole answer unreadable.
RETURNING {claimed}
