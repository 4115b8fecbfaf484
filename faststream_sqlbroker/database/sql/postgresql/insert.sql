-- :queues varchar[] :payloads bytes[] :headers text[] :priorities smallint[] :keys varchar[]
-- :dedup_ids varchar[] :delays float[] :times time[] :expiries float[]
-- Inserts messages that differ in more than their bodies and headers.
-- Each array is one bind, so the text is the same for every size of a batch, and stays prepared.
WITH r AS MATERIALIZED (
  -- Ids are drawn here, so that they are known row by row: RETURNING promises no order.
  SELECT nextval((SELECT pg_get_serial_sequence({message_literal}, 'id')::regclass)) AS id, u.*
  FROM unnest(:queues, :payloads, :headers, :priorities, :keys, :dedup_ids, \
    :delays, :times, :expiries)
    WITH ORDINALITY AS u(queue, payload, headers, priority, key, dedup_id, \
      delay, at, expires_in, ord)
), i AS (
  INSERT INTO {message}
    (id, queue, payload, headers, priority, key, dedup_id, created_at, \
      next_attempt_at, expires_at)
  SELECT r.id, r.queue, r.payload, r.headers::jsonb, r.priority, r.key, r.dedup_id, \
    statement_timestamp(),
    coalesce(r.at, statement_timestamp() + coalesce(r.delay, 0) * interval '1 second'),
    statement_timestamp() + r.expires_in * interval '1 second'
  FROM r ORDER BY r.ord
  
  RETURNING id
)
SELECT i.id FROM r LEFT JOIN i ON i.id = r.id ORDER BY r.ord
