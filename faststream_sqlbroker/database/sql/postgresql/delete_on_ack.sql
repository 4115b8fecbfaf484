-- :ids text :places text :tokens uuid[] :owners bigint[] :queues varchar[] :payloads bytes[]
-- :headers text[] :priorities smallint[] :keys varchar[] :delays float[] :times time[]
-- :expiries float[]
-- `delete`, together with the insert of the messages that are published with the acks. It commits
-- by itself, so acks that publish take one round trip, as acks alone do.
WITH d AS (
DELETE FROM {message} m USING unnest((:ids)::bigint[], (:places)::int[]) AS u(id, place)
WHERE m.id = u.id AND m.lease_token = (:tokens)[u.place]
RETURNING m.id
), n AS (
  -- A message is inserted if and only if the row that it belongs to was deleted here.
  INSERT INTO {message} (queue, payload, headers, priority, key, created_at, \
    next_attempt_at, expires_at)
  SELECT u.queue, u.payload, u.headers::jsonb, u.priority, u.key, statement_timestamp(),
    coalesce(u.at, statement_timestamp() + coalesce(u.delay, 0) * interval '1 second'),
    statement_timestamp() + u.expires_in * interval '1 second'
  FROM unnest(:owners, :queues, :payloads, :headers, :priorities, :keys, \
    :delays, :times, :expiries)
    WITH ORDINALITY AS u(owner, queue, payload, headers, priority, key, \
      delay, at, expires_in, ord)
  WHERE u.owner IN (SELECT d.id FROM d)
  ORDER BY u.ord
  RETURNING id
)
SELECT d.id, (SELECT count(*) FROM n) FROM d
