WITH u AS MATERIALIZED (
  SELECT * FROM unnest(:ids, :tokens, :states, :attempts, :charges, :ends, :reasons, :related, :errors, :fingerprints)
    AS u(id, token, state, attempts, charge, ended, reason, related_id, error, fingerprint)
), d AS (
  DELETE FROM message m USING u WHERE m.id = u.id AND (SELECT count(*)
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0
    AND m.lease_token = u.token RETURNING m.*
), a AS (
  INSERT INTO message_archive (id, queue, priority, key, dedup_id, headers, payload, state, attempts_count, deliveries_count, publish_count, origin_id, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, acquired_at, last_error, hops, policy_key, archived_at, reason, related_id, error_fingerprint)
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, u.state,
    d.attempts_count + u.attempts, d.deliveries_count + u.charge, d.publish_count, d.origin_id,
    d.created_at, d.next_attempt_at, d.expires_at,
    coalesce(d.first_attempt_at, d.acquired_at + u.ended * interval '1 second'),
    coalesce(d.acquired_at + u.ended * interval '1 second', d.last_attempt_at),
    d.acquired_at, coalesce(u.error, d.last_error), d.hops, d.policy_key, statement_timestamp(),
    u.reason, u.related_id, u.fingerprint
  FROM d JOIN u ON u.id = d.id AND u.token = d.lease_token
)
SELECT id FROM d
