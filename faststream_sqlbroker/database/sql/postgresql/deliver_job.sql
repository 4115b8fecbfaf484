-- :job bigint :one int :queue varchar :token uuid
WITH d AS (
  DELETE FROM {message} m
  WHERE m.id = :job AND (SELECT count(*)
    FROM generate_series(1, :one) AS a, \
      generate_series(1, :one) AS b) > 0 AND CASE WHEN m.queue = :queue \
      AND m.state = 'PROCESSING'
    AND m.lease_expires_at > statement_timestamp()
    AND m.lease_token = coalesce(:token, m.lease_token) THEN true ELSE false END
  RETURNING m.id, m.queue, m.priority, m.key, m.dedup_id, m.headers, m.payload, \
    m.state, m.attempts_count, m.deliveries_count, m.publish_count, m.origin_id, \
    m.created_at, m.next_attempt_at, m.expires_at, m.first_attempt_at, \
    m.last_attempt_at, m.acquired_at, m.last_error, m.hops, m.policy_key, \
    m.lease_token, greatest(m.acquired_at, statement_timestamp()) AS ended_at
), a AS (
  INSERT INTO {archive} ({archived}, archived_at)
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, \
    'COMPLETED',
    d.attempts_count + 1, d.deliveries_count, d.publish_count, d.origin_id,
    d.created_at, d.next_attempt_at, d.expires_at, \
      coalesce(d.first_attempt_at, d.ended_at), d.ended_at,
    d.acquired_at, d.last_error, d.hops, d.policy_key, statement_timestamp()
  FROM d
)
SELECT d.id, d.lease_token, extract(epoch FROM d.ended_at - d.acquired_at)::float8 \
  FROM d
