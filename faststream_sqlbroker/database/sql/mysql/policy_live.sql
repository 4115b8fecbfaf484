-- variants: by_header
-- :rows text :queue varchar
-- Reads what there is to know of those of these messages that are in the queue, leased or not.
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
SELECT m.id, m.state, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at), \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.acquired_at),
  -- The difference is the deliveries that ended without an attempt, while it is not leased.
  m.{key_column}, m.policy_marks, m.deliveries_count - m.attempts_count,
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END
-- No index serves a CASE: only the ids can find the rows, not the queue.
-- Without the hint the server scans a small table.
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id BIGINT PATH '$.id')) u \
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id \
WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
