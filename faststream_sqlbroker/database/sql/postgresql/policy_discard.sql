-- variants: by_header
-- :rows text :queue varchar
-- Ends messages that have no lease as DISCARDED, and archives them.
-- The list is one JSON bind, so the text never changes.
WITH u AS MATERIALIZED (SELECT * FROM json_to_recordset((:rows)::json) \
  AS u(id bigint, reason text, related_id bigint, k text)), d AS (
  DELETE FROM {message} m USING u \
  WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
  -- The race: an operator's edit of the key commits after the claim has read it.
  AND (u.k IS NULL OR m.{key_column} = u.k)
  RETURNING m.*, u.reason AS why, u.related_id AS whom
), a AS (
  INSERT INTO {archive} ({archived}, archived_at, reason, related_id)
  -- Of what stood by, the CASE takes off what was added to its due time for that.
  -- Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255. So
  -- whole seconds and the microseconds left are added separately.
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, \
    'DISCARDED', d.attempts_count, d.deliveries_count, d.publish_count, \
    d.origin_id, d.created_at, \
    CASE WHEN d.next_attempt_at >= (timestamptz 'epoch' \
        + ({standby}) / 1000000 * interval '1 second' \
        + ({standby}) % 1000000 * interval '1 microsecond') \
      AND (d.policy_marks & {held_burst}) > 0 \
    THEN (timestamptz 'epoch' \
      + (((extract(epoch FROM d.next_attempt_at) * 1000000)::bigint \
        - {standby})) / 1000000 * interval '1 second' \
      + (((extract(epoch FROM d.next_attempt_at) * 1000000)::bigint \
        - {standby})) % 1000000 * interval '1 microsecond') \
    ELSE d.next_attempt_at END, \
    d.expires_at, d.first_attempt_at, d.last_attempt_at, d.acquired_at, \
    d.last_error, d.hops, d.policy_key, statement_timestamp(), d.why, d.whom \
  FROM d
)
SELECT count(*) FROM d
