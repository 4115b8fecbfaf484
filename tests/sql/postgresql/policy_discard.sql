WITH u AS MATERIALIZED (SELECT * FROM json_to_recordset((:rows)::json) AS u(id bigint, reason text)), d AS (
  DELETE FROM message m USING u WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE') RETURNING m.*, u.reason AS why
), a AS (
  INSERT INTO message_archive (id, queue, priority, key, dedup_id, headers, payload, state, attempts_count, deliveries_count, publish_count, origin_id, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, acquired_at, last_error, archived_at, reason)
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, 'DISCARDED', d.attempts_count, d.deliveries_count, d.publish_count, d.origin_id, d.created_at, d.next_attempt_at, d.expires_at, d.first_attempt_at, d.last_attempt_at, d.acquired_at, d.last_error, statement_timestamp(), d.why FROM d
)
SELECT count(*) FROM d
