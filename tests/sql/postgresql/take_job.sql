UPDATE message m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.id = :job AND (SELECT count(*)
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0 AND CASE WHEN m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= statement_timestamp()
    AND coalesce(m.expires_at > statement_timestamp(), true)
    AND NOT EXISTS (SELECT 1 FROM message_policy_state s
    WHERE s.scope = 'paused' AND s.key = :queue
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp()))
    AND EXISTS (SELECT 1 FROM message_policy_state s
    WHERE s.scope = :channel AND s.key = :consumer AND s.info ->> 'type' = 'pull')
    THEN true ELSE false END
RETURNING m.id, m.queue, m.payload, m.headers::text, m.priority, m.key, m.attempts_count, m.deliveries_count, m.publish_count, timestamptz_send(m.created_at), timestamptz_send(m.next_attempt_at), m.expires_at, m.first_attempt_at, m.last_attempt_at, timestamptz_send(m.acquired_at), m.hops
