-- variants: by_header
-- :rows text :queue varchar :size int
-- Reads what stands by, key by key, of each key the oldest first: messages whose ids lie between
-- the two of their key. The list is one JSON bind, so the text never changes. Times are whole
-- microseconds since 1970 (UTC).
-- Another program may write created_at by a clock that is ahead. No message arrives after now.
SELECT m.id, m.{key_column}, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END, \
  (extract(epoch FROM LEAST(m.created_at, statement_timestamp())) * 1000000)::bigint, u.n
-- Trap: a join without fresh statistics reads all of the queue, and all of `u` for each message.
-- OFFSET 0 keeps the planner from making one.
FROM json_to_recordset((:rows)::json) AS u(n bigint, k text, low bigint, high bigint) \
CROSS JOIN LATERAL (SELECT * FROM {message} m \
  WHERE m.queue = :queue AND m.{key_column} = u.k AND m.id > u.low AND m.id < u.high
  -- No index serves a CASE: that of due times would give all that stands by.
  -- Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255. So
  -- whole seconds and the microseconds left are added separately.
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') \
      AND m.next_attempt_at >= (timestamptz 'epoch' \
        + ({standby}) / 1000000 * interval '1 second' \
        + ({standby}) % 1000000 * interval '1 microsecond') \
      AND (m.policy_marks & {held_burst}) > 0 \
    THEN 1 ELSE 0 END = 1 \
  OFFSET 0) m
ORDER BY u.n, m.id LIMIT :size
