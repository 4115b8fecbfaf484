-- :queue varchar
SELECT m.id, m.queue, m.payload, m.headers::text, m.priority, m.key, m.attempts_count, \
  m.deliveries_count, m.publish_count, timestamptz_send(m.created_at), \
  timestamptz_send(m.next_attempt_at), m.expires_at, m.first_attempt_at, \
  m.last_attempt_at, timestamptz_send(statement_timestamp()), m.hops
FROM {message} m
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue \
  AND m.next_attempt_at <= statement_timestamp()
ORDER BY m.queue, m.priority DESC, m.next_attempt_at, m.id
LIMIT {most_read}
