-- variants: anew, inside, on_ack
-- :ids text :places text :ends text :tokens uuid[] :one int :owners bigint[] :queues varchar[]
-- :payloads bytes[] :headers text[] :priorities smallint[] :keys varchar[] :delays float[]
-- :times time[] :expiries float[]
WITH d AS (
  DELETE FROM {message} m
  USING unnest((:ids)::bigint[], (:places)::int[], (:ends)::bigint[]) AS u(id, place, \
    ended)
  WHERE m.id = u.id AND m.lease_token = (:tokens)[u.place]  --? !anew !inside
  WHERE m.id = u.id AND (SELECT count(*)  --? anew
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0  --? anew
  WHERE m.id = u.id AND pg_current_xact_id_if_assigned() = (:transaction)::text::xid8 \  --? inside
    AND m.lease_token = (:tokens)[u.place]  --? anew|inside
  RETURNING m.id, m.queue, m.priority, m.key, m.dedup_id, m.headers, m.payload, \
    m.state, m.attempts_count, m.deliveries_count, m.publish_count, m.origin_id, \
    m.created_at, m.next_attempt_at, m.expires_at, m.first_attempt_at, \
    m.last_attempt_at, m.acquired_at, m.last_error, m.hops, m.policy_key, \
    m.acquired_at + u.ended * interval '1 microsecond' AS ended_at
), a AS (
  INSERT INTO {archive} ({archived}, archived_at)
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, \
    'COMPLETED',
    d.attempts_count + 1, d.deliveries_count, d.publish_count, d.origin_id,
    d.created_at, d.next_attempt_at, d.expires_at, \
      coalesce(d.first_attempt_at, d.ended_at), d.ended_at,
    d.acquired_at, d.last_error, d.hops, d.policy_key, statement_timestamp()
  FROM d
), n AS (  --? on_ack
  INSERT INTO {message} (queue, payload, headers, priority, key, created_at, \  --? on_ack
    next_attempt_at, expires_at)  --? on_ack
  SELECT u.queue, u.payload, u.headers::jsonb, u.priority, u.key, statement_timestamp(),  --? on_ack
    coalesce(u.at, statement_timestamp() + coalesce(u.delay, 0) * interval '1 second'),  --? on_ack
    statement_timestamp() + u.expires_in * interval '1 second'  --? on_ack
  FROM unnest(:owners, :queues, :payloads, :headers, :priorities, :keys, :delays, \  --? on_ack
    :times, :expiries)  --? on_ack
    WITH ORDINALITY AS u(owner, queue, payload, headers, priority, key, delay, at, \  --? on_ack
      expires_in, ord)  --? on_ack
  WHERE u.owner IN (SELECT d.id FROM d)  --? on_ack
  ORDER BY u.ord  --? on_ack
  RETURNING id  --? on_ack
)
SELECT d.id, (SELECT count(*) FROM n) FROM d  --? on_ack
SELECT id FROM d  --? !on_ack
