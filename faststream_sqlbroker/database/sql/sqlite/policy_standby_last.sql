-- variants: by_header
-- :rows text :queue varchar :size int
-- Reads what stands by of some keys, between two ids each, key by key in the order of the list, the
-- newest first. It is sent when such a message is to take a place, or is to go.
-- Keys are read as bytes: text that is not UTF-8 would fail the read. Both are searched for, as
-- another program may have written bytes.
-- MIN: another program may write created_at by a clock that is ahead, or text, which sorts after
-- all numbers. No message arrives after now.
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at,
  CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END, MIN(m.created_at, {now}), u.n
FROM (SELECT json_extract(value, '$.n') AS n, json_extract(value, '$.k') AS k, \
    json_extract(value, '$.low') AS low, json_extract(value, '$.high') AS high \
  FROM json_each(:rows)) u \
CROSS JOIN {message} m INDEXED BY {key_index} \
  ON m.queue = :queue \
    AND m.{key_column} IN (u.k, CAST(u.k AS BLOB)) \
    AND m.id > u.low AND m.id < u.high
  -- No index serves a CASE: that of due times would give all that stands by.
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at >= {standby} \
    AND (m.policy_marks & {held_burst}) > 0 THEN 1 ELSE 0 END = 1
ORDER BY u.n, m.id DESC LIMIT :size
