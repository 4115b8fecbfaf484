-- variants: by_header
-- :rows text :queue varchar
SELECT m.id, m.state, m.next_attempt_at, m.acquired_at,
  CAST(m.{key_column} AS BLOB), m.policy_marks, m.deliveries_count - m.attempts_count,
  CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END, m.deliveries_count + 0
FROM (SELECT json_extract(value, '$.id') AS id FROM json_each(:rows)) u CROSS \
  JOIN {message} m  ON m.id = u.id WHERE CASE WHEN m.queue = :queue THEN 1 \
  ELSE 0 END = 1
