WITH r AS MATERIALIZED (
  SELECT nextval((SELECT pg_get_serial_sequence('message', 'id')::regclass)) AS id, u.*
  FROM unnest(:payloads, :headers) WITH ORDINALITY AS u(payload, headers, ord)
), i AS (
  INSERT INTO message
    (id, queue, payload, headers, priority, key, created_at, next_attempt_at, expires_at)
  SELECT r.id, :queue, r.payload, (r.headers)::jsonb, :priority, :key, statement_timestamp(),
  coalesce(:at, statement_timestamp() + coalesce(:delay, 0) * interval '1 second'),
  statement_timestamp() + :expires_in * interval '1 second'
  FROM r ORDER BY r.ord
)
SELECT r.id FROM r ORDER BY r.ord
