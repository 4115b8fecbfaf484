WITH u AS MATERIALIZED (SELECT * FROM json_to_recordset((:rows)::json) AS u(id bigint, reason text, related_id bigint, k text)), d AS (
  DELETE FROM message m USING u WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
  AND (u.k IS NULL OR m.policy_key = u.k)
  RETURNING m.*, u.reason AS why, u.related_id AS whom
), a AS (
  INSERT INTO message_archive (id, queue, priority, key, dedup_id, headers, payload, state, attempts_count, deliveries_count, publish_count, origin_id, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, acquired_at, last_error, hops, policy_key, archived_at, reason, related_id)
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, 'DISCARDED', d.attempts_count, d.deliveries_count, d.publish_count, d.origin_id, d.created_at, CASE WHEN d.next_attempt_at >= (timestamptz 'epoch' + (220898707200000000) / 1000000 * interval '1 second' + (220898707200000000) % 1000000 * interval '1 microsecond') AND (d.policy_marks & 256) > 0 THEN (timestamptz 'epoch' + (((extract(epoch FROM d.next_attempt_at) * 1000000)::bigint - 220898707200000000)) / 1000000 * interval '1 second' + (((extract(epoch FROM d.next_attempt_at) * 1000000)::bigint - 220898707200000000)) % 1000000 * interval '1 microsecond') ELSE d.next_attempt_at END, d.expires_at, d.first_attempt_at, d.last_attempt_at, d.acquired_at, d.last_error, d.hops, d.policy_key, statement_timestamp(), d.why, d.whom FROM d
)
SELECT count(*) FROM d
