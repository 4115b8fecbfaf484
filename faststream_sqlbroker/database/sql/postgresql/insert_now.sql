-- :payload bytes :headers text
-- Inserts one message that was published without options, which nearly all are: values that are not
-- bound need neither be sent nor worked out.
INSERT INTO {message} (queue, payload, headers, priority, created_at, next_attempt_at)
VALUES (:queue, :payload, (:headers)::jsonb, 0, statement_timestamp(), statement_timestamp())
RETURNING id
