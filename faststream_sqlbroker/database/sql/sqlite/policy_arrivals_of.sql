-- variants: by_header
-- :rows text :queue varchar :before int :own int :size int
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at, MIN(m.created_at, {now}),
  CASE WHEN m.expires_at <= {now} THEN 1 \
    ELSE 0 END, m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), \
    m.policy_marks, u.n
FROM (SELECT json_extract(value, '$.n') AS n, json_extract(value, '$.k') AS k \
  FROM json_each(:rows)) u CROSS JOIN {message} m INDEXED BY {key_index} \
  ON m.queue = :queue AND m.{key_column} = u.k
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= {now} \
  AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY u.n, m.next_attempt_at, m.id LIMIT :size
