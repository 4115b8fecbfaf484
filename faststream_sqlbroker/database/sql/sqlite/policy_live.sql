-- variants: by_header
-- :rows text :queue varchar
-- Reads those of some messages that are in the queue still, leased or not.
-- The key is read as bytes: text that is not UTF-8 would fail the read.
SELECT m.id, m.state, m.next_attempt_at, m.acquired_at,
  CAST(m.{key_column} AS BLOB), m.policy_marks, m.deliveries_count - m.attempts_count,
  CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END
-- No index serves a CASE: the messages are searched by their ids, never by the queue.
FROM (SELECT json_extract(value, '$.id') AS id FROM json_each(:rows)) u \
CROSS JOIN {message} m  ON m.id = u.id \
WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
