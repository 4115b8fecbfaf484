-- variants: by_header
-- :queue varchar :priority smallint :since bigint :before int :own int :size int
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at, MIN(m.created_at, {now}),
  CASE WHEN m.expires_at <= {now} THEN 1 \
    ELSE 0 END, m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), \
    m.policy_marks
FROM {message} m INDEXED BY {ready_index}
WHERE m.queue = :queue AND m.priority = :priority \
  AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= {now}
  AND m.next_attempt_at >= :since AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY m.next_attempt_at, m.id LIMIT :size
