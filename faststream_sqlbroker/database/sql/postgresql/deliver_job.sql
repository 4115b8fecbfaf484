-- :job bigint :one int :queue varchar :token uuid
-- Ends a job of a pull consumer as done, under the lease `token` if the consumer says which. It
-- returns nothing if the job is not in flight, its time is over, or it has another lease. Then a
-- transaction of several statements finds out which of these it was.
WITH d AS (
  DELETE FROM {message} m
  -- The count always holds (`one` is 1), and has this planned anew each time: without the value the
  -- planner expects a million rows of the two series, so a generic plan always seems to cost more.
  -- Trap: without fresh statistics the planner takes another index than that of ids, and reads all
  -- rows of a deep queue. No index serves a CASE.
  WHERE m.id = :job AND (SELECT count(*)
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0 \
    AND CASE WHEN m.queue = :queue AND m.state = 'PROCESSING'
    AND m.lease_expires_at > statement_timestamp()
    AND m.lease_token = coalesce(:token, m.lease_token) \
    THEN true ELSE false END
  -- Not all columns of the message: one of the user's may have the name of ours.
  RETURNING m.id, m.queue, m.priority, m.key, m.dedup_id, m.headers, m.payload, m.state, \
    m.attempts_count, m.deliveries_count, m.publish_count, m.origin_id, \
    m.created_at, m.next_attempt_at, m.expires_at, m.first_attempt_at, m.last_attempt_at, \
    m.acquired_at, m.last_error, m.hops, m.policy_key, m.lease_token, \
    greatest(m.acquired_at, statement_timestamp()) AS ended_at
), a AS (
  INSERT INTO {archive} ({archived}, archived_at)
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, 'COMPLETED',
    d.attempts_count + 1, d.deliveries_count, d.publish_count, d.origin_id,
    d.created_at, d.next_attempt_at, d.expires_at, \
    coalesce(d.first_attempt_at, d.ended_at), d.ended_at,
    d.acquired_at, d.last_error, d.hops, d.policy_key, statement_timestamp()
  FROM d
)
SELECT d.id, d.lease_token, extract(epoch FROM d.ended_at - d.acquired_at)::float8 FROM d
