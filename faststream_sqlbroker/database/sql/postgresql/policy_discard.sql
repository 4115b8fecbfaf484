-- variants: by_header, no_archive, by_header no_archive
-- :rows text :queue varchar
WITH u AS MATERIALIZED (SELECT * \
  FROM json_to_recordset((:rows)::json) AS u(id bigint, reason text, \
  related_id bigint, k text)), d AS (
  DELETE FROM {message} m USING u WHERE m.id = u.id AND m.queue = :queue \
    AND m.state IN ('PENDING', 'RETRYABLE')
  AND (u.k IS NULL OR m.{key_column} = u.k)
  RETURNING m.*, u.reason AS why, u.related_id AS whom
), a AS (  --? !no_archive
  INSERT INTO {archive} ({archived}, archived_at, reason, related_id)  --? !no_archive
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, \  --? !no_archive
    'DISCARDED', d.attempts_count, d.deliveries_count, d.publish_count, d.origin_id, \  --? !no_archive
    d.created_at, CASE WHEN d.next_attempt_at >= (timestamptz 'epoch' + ({standby}) / \  --? !no_archive
    1000000 * interval '1 second' + ({standby}) % 1000000 * interval '1 microsecond') \  --? !no_archive
    AND (d.policy_marks & {held_burst}) > 0 \  --? !no_archive
    THEN (timestamptz 'epoch' + (((extract(epoch \  --? !no_archive
    FROM d.next_attempt_at) * 1000000)::bigint - {standby})) / 1000000 * interval \  --? !no_archive
    '1 second' + (((extract(epoch \  --? !no_archive
    FROM d.next_attempt_at) * 1000000)::bigint - {standby})) % 1000000 * interval \  --? !no_archive
    '1 microsecond') ELSE d.next_attempt_at END, d.expires_at, d.first_attempt_at, \  --? !no_archive
    d.last_attempt_at, d.acquired_at, d.last_error, d.hops, d.policy_key, \  --? !no_archive
    statement_timestamp(), d.why, d.whom FROM d  --? !no_archive
)
SELECT count(*) FROM d
