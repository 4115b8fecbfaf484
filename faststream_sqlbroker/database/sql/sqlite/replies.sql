-- :queue varchar
SELECT id, queue, CAST(payload AS BLOB) AS payload, CAST(headers AS BLOB) AS headers, \
  priority, CAST("key" AS BLOB) AS "key", attempts_count, deliveries_count, \
  publish_count, created_at, next_attempt_at, expires_at, first_attempt_at, \
  last_attempt_at, {now} AS acquired_at, hops
FROM {message} m INDEXED BY {ready_index}
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue \
  AND m.next_attempt_at <= {now}
LIMIT {most_read}
