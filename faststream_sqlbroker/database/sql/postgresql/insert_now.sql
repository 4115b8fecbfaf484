-- :payload bytes :headers text
INSERT INTO {message} (queue, payload, headers, priority, created_at, next_attempt_at)
VALUES (:queue, :payload, (:headers)::jsonb, 0, statement_timestamp(), \
  statement_timestamp())
RETURNING id
