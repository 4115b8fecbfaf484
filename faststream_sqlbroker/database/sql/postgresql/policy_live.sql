-- variants: by_header
-- :rows text :queue varchar
-- Reads what policies want to know of messages that they remember, if these are in the queue still.
-- The list is one JSON bind, so the text never changes.
-- Times are whole microseconds since 1970 (UTC).
SELECT m.id, m.state, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint, \
  (extract(epoch FROM m.acquired_at) * 1000000)::bigint,
  m.{key_column}, m.policy_marks, m.deliveries_count - m.attempts_count,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END
-- Trap: without fresh statistics PostgreSQL would find the rows by the queue, and read all of it.
-- No index serves a CASE.
FROM json_to_recordset((:rows)::json) AS u(id bigint) \
  JOIN {message} m  ON m.id = u.id \
WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
