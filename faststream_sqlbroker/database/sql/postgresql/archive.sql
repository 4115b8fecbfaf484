-- variants: anew, inside
-- :ids bigint[] :tokens uuid[] :states varchar[] :attempts int[] :charges int[] :ends float[]
-- :reasons varchar[] :related bigint[] :errors text[] :fingerprints varchar[] :one int
-- Ends deliveries whose messages leave the queue and are kept, but for plain acks: deletes each row
-- whose lease is still held, and archives it.
-- Each array is one bind, so the text is the same for every size of a batch, and stays prepared.
WITH u AS MATERIALIZED (
  SELECT * FROM unnest(:ids, :tokens, :states, :attempts, :charges, :ends, \
    :reasons, :related, :errors, :fingerprints)
    AS u(id, token, state, attempts, charge, ended, \
      reason, related_id, error, fingerprint)
), d AS (
  -- anew, which is sent for one message, is planned anew each time. Its condition always holds
  -- (`one` is 1). Without the value the planner expects a million rows of the two series, so a
  -- generic plan always seems to cost more.
  -- inside writes nothing unless it runs in the transaction of that number.
  DELETE FROM {message} m USING u \
  WHERE m.id = u.id \
    AND (SELECT count(*)  --? anew
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0  --? anew
    AND pg_current_xact_id_if_assigned() = (:transaction)::text::xid8 \  --? inside
    AND m.lease_token = u.token \
  RETURNING m.*
), a AS (
  INSERT INTO {archive} ({archived}, archived_at, reason, related_id, error_fingerprint)
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
