WITH r AS MATERIALIZED (
  SELECT x.*
  FROM unnest(:queues, :priorities, :since) WITH ORDINALITY AS p(queue, priority, since, ord)
  CROSS JOIN LATERAL (
    SELECT m.ctid AS c FROM message m
    WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
      AND m.next_attempt_at BETWEEN coalesce(p.since, '-infinity') AND statement_timestamp()
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
    ORDER BY m.next_attempt_at, m.id LIMIT :limit FOR UPDATE SKIP LOCKED) x
  LIMIT :limit
)
UPDATE message m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + CASE
    WHEN m.ctid = ANY(ARRAY(SELECT r.c FROM r LIMIT :free))
    THEN :lease ELSE :waiting END * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING m.id, m.queue, m.payload, m.headers::text, m.priority, m.key, m.attempts_count, m.deliveries_count, m.publish_count, timestamptz_send(m.created_at), timestamptz_send(m.next_attempt_at), m.expires_at, m.first_attempt_at, m.last_attempt_at, timestamptz_send(m.acquired_at), m.hops,
  m.lease_expires_at < m.acquired_at + :lease * interval '1 second'
