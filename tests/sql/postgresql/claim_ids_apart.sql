WITH r AS MATERIALIZED (
  SELECT m.ctid AS c, m.id, m.attempts_count, m.deliveries_count,
      (m.deliveries_count - m.attempts_count BETWEEN :losses AND :final) AS suspect FROM message m
  WHERE m.id = ANY(:ids) AND CASE WHEN m.queue = ANY(:queues)
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    THEN true ELSE false END
  FOR UPDATE SKIP LOCKED
), u AS (
UPDATE message m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r WHERE NOT r.suspect))
RETURNING m.id, m.queue, m.payload, m.headers::text, m.priority, m.key, m.attempts_count, m.deliveries_count, m.publish_count, timestamptz_send(m.created_at), timestamptz_send(m.next_attempt_at), m.expires_at, m.first_attempt_at, m.last_attempt_at, timestamptz_send(m.acquired_at), m.hops
)
SELECT * FROM u
UNION ALL
SELECT r.id, NULL, NULL, NULL, NULL, NULL, r.attempts_count, r.deliveries_count, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM r WHERE r.suspect
