-- :queue varchar
-- Reads the replies to requests in a queue that one process has for itself. They stay there and
-- have no lease, so the time of the look takes the place of that of the claim.
-- In the order of the index of ready rows: only this makes PostgreSQL use it.
-- States are literals: with bound ones a generic plan could not use the partial index.
SELECT m.id, m.queue, m.payload, m.headers::text, m.priority, m.key, \
  m.attempts_count, m.deliveries_count, m.publish_count, \
  timestamptz_send(m.created_at), timestamptz_send(m.next_attempt_at), m.expires_at, \
  m.first_attempt_at, m.last_attempt_at, timestamptz_send(statement_timestamp()), m.hops
FROM {message} m
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue \
  AND m.next_attempt_at <= statement_timestamp()
ORDER BY m.queue, m.priority DESC, m.next_attempt_at, m.id
LIMIT {max_replies}
