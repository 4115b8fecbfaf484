-- variants: anew, inside, on_ack
-- :ids text :places text :ends text :tokens uuid[] :one int :owners bigint[] :queues varchar[]
-- :payloads bytes[] :headers text[] :priorities smallint[] :keys varchar[] :delays float[]
-- :times time[] :expiries float[]
-- Archives plain acks, which nearly all outcomes are: a third of the binds of `archive`, and no
-- second join. on_ack also inserts the messages that are published with the acks.
-- Numbers go as the text of an array, which asyncpg sends as it is: each element of an array costs
-- it time. Messages of one claim share a token, so `places` says which of `tokens` is whose.
WITH d AS (
  -- anew, which is sent for one message, is planned anew each time. Its condition always holds
  -- (`one` is 1). Without the value the planner expects a million rows of the two series, so a
  -- generic plan always seems to cost more.
  -- inside writes nothing unless it runs in the transaction of that number.
  DELETE FROM {message} m
  USING unnest((:ids)::bigint[], (:places)::int[], (:ends)::bigint[]) AS u(id, place, ended)
  WHERE m.id = u.id \
    AND (SELECT count(*)  --? anew
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0  --? anew
    AND pg_current_xact_id_if_assigned() = (:transaction)::text::xid8 \  --? inside
    AND m.lease_token = (:tokens)[u.place]
  -- Not all columns of the message: one of the user's may have the name of ours.
  RETURNING m.id, m.queue, m.priority, m.key, m.dedup_id, m.headers, m.payload, m.state, \
    m.attempts_count, m.deliveries_count, m.publish_count, m.origin_id, \
    m.created_at, m.next_attempt_at, m.expires_at, m.first_attempt_at, m.last_attempt_at, \
    m.acquired_at, m.last_error, m.hops, m.policy_key, \
    m.acquired_at + u.ended * interval '1 microsecond' AS ended_at
), a AS (
  INSERT INTO {archive} ({archived}, archived_at)
  SELECT d.id, d.queue, d.priority, d.key, d.dedup_id, d.headers, d.payload, 'COMPLETED',
    d.attempts_count + 1, d.deliveries_count, d.publish_count, d.origin_id,
    d.created_at, d.next_attempt_at, d.expires_at, \
    coalesce(d.first_attempt_at, d.ended_at), d.ended_at,
    d.acquired_at, d.last_error, d.hops, d.policy_key, statement_timestamp()
  FROM d
), n AS (  --? on_ack
  -- on_ack inserts a message if and only if the row that it belongs to was deleted here.
  INSERT INTO {message} (queue, payload, headers, priority, key, created_at, \  --? on_ack
    next_attempt_at, expires_at)  --? on_ack
  SELECT u.queue, u.payload, u.headers::jsonb, u.priority, u.key, statement_timestamp(),  --? on_ack
    coalesce(u.at, statement_timestamp() + coalesce(u.delay, 0) * interval '1 second'),  --? on_ack
    statement_timestamp() + u.expires_in * interval '1 second'  --? on_ack
  FROM unnest(:owners, :queues, :payloads, :headers, :priorities, :keys, \  --? on_ack
    :delays, :times, :expiries)  --? on_ack
    WITH ORDINALITY AS u(owner, queue, payload, headers, priority, key, \  --? on_ack
      delay, at, expires_in, ord)  --? on_ack
  WHERE u.owner IN (SELECT d.id FROM d)  --? on_ack
  ORDER BY u.ord  --? on_ack
  RETURNING id  --? on_ack
)
SELECT d.id, (SELECT count(*) FROM n) FROM d  --? on_ack
SELECT id FROM d  --? !on_ack
