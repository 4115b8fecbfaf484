-- :queue varchar :payload bytes :headers text :priority smallint :key varchar :at time
-- :delay float :expires_in float
-- Inserts one message that was published with options, but without a dedup_id.
INSERT INTO {message} (queue, payload, headers, priority, key, created_at, \
  next_attempt_at, expires_at)
VALUES (:queue, :payload, (:headers)::jsonb, :priority, :key, statement_timestamp(),
  coalesce(:at, statement_timestamp() + coalesce(:delay, 0) * interval '1 second'),
  statement_timestamp() + :expires_in * interval '1 second')
RETURNING id
