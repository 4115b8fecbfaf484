-- :queue varchar :headers text :priority smallint :key varchar :at time :delay float
-- :expires_in float :payloads bytes[]
INSERT INTO {message} (queue, payload, headers, priority, key, created_at, \
  next_attempt_at, expires_at)
SELECT :queue, u.payload, (:headers)::jsonb, :priority, :key, statement_timestamp(),
  coalesce(:at, statement_timestamp() + coalesce(:delay, 0) * interval '1 second'),
  statement_timestamp() + :expires_in * interval '1 second'
FROM unnest(:payloads) WITH ORDINALITY AS u(payload, ord) ORDER BY u.ord
RETURNING id
