-- variants: by_header, one, one by_header, others, others by_header
-- :queue varchar :priority smallint :now bigint :before int :size int :final int :losses int
-- :only bigint
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at
FROM {message} m INDEXED BY {ready_index}
WHERE m.queue = :queue AND m.priority = :priority \
  AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= {now}
  AND m.next_attempt_at <= :now AND (m.policy_marks & :before) >= :before
    AND NOT (m.deliveries_count = :final  --? others
      OR m.deliveries_count < :final \  --? others
        AND m.deliveries_count - m.attempts_count >= :losses)  --? others
  AND m.id = :only  --? one
ORDER BY m.next_attempt_at, m.id LIMIT :size
