-- :queue varchar :priority smallint :key varchar :at time :delay float :expires_in float
-- :payloads bytes[] :headers text[]
-- Inserts messages that differ only in their bodies and headers. What they share is bound once:
-- asyncpg spends time on each element of each array.
-- The column's default draws the ids after the sort, so the smallest id is the first row's.
-- RETURNING promises no order, so the client sorts the ids. SQLAlchemy's insertmanyvalues relies on
-- the same.
INSERT INTO {message} (queue, payload, headers, priority, key, created_at, \
  next_attempt_at, expires_at)
SELECT :queue, u.payload, (u.headers)::jsonb, :priority, :key, statement_timestamp(),
  coalesce(:at, statement_timestamp() + coalesce(:delay, 0) * interval '1 second'),
  statement_timestamp() + :expires_in * interval '1 second'
FROM unnest(:payloads, :headers) WITH ORDINALITY AS u(payload, headers, ord) ORDER BY u.ord
RETURNING id
