-- variants: by_header
-- :rows text :queue varchar :size int
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at,
  CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END, MIN(m.created_at, {now}), u.n
FROM (SELECT json_extract(value, '$.n') AS n, json_extract(value, '$.k') AS k, \
  json_extract(value, '$.low') AS low, json_extract(value, '$.high') AS high \
  FROM json_each(:rows)) u CROSS JOIN {message} m INDEXED BY {key_index} \
  ON m.queue = :queue AND m.{key_column} IN (u.k, CAST(u.k AS BLOB)) AND m.id > u.low \
  AND m.id < u.high
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at >= {standby} \
    AND (m.policy_marks & {held_burst}) > 0 THEN 1 ELSE 0 END = 1
ORDER BY u.n, m.id DESC LIMIT :size
