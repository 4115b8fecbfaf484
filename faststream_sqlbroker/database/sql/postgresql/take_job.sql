-- :token uuid :lease float :job bigint :one int :queue varchar :channel varchar :consumer varchar
UPDATE {message} m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.id = :job AND (SELECT count(*)
    FROM generate_series(1, :one) AS a, \
      generate_series(1, :one) AS b) > 0 AND CASE WHEN m.queue = :queue \
      AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= statement_timestamp()
    AND coalesce(m.expires_at > statement_timestamp(), true)
    AND NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.key = :queue
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp()))
    AND EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = :channel AND s.key = :consumer AND s.info ->> 'type' = 'pull')
    THEN true ELSE false END
RETURNING {claimed}
