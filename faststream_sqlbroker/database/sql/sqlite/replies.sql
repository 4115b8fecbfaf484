-- :queue varchar
-- Reads the replies to the requests of one process. Only that process reads the queue, so a reply
-- needs no lease: it is handed over, and then deleted by its id.
-- Body, headers and key are read as bytes: a column holds whatever was put there, and text that is
-- no UTF-8 would make the whole answer unreadable.
SELECT id, queue, CAST(payload AS BLOB) AS payload, CAST(headers AS BLOB) AS headers, \
  priority, CAST("key" AS BLOB) AS "key", attempts_count, deliveries_count, publish_count, \
  created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, \
  {now} AS acquired_at, hops
FROM {message} m INDEXED BY {ready_index}
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue AND m.next_attempt_at <= {now}
LIMIT {max_replies}
