-- variants: by_header, one, one by_header, others, others by_header
-- :queue varchar :priority smallint :now bigint :before int :size int :final int :losses int
-- :only bigint
SELECT m.id, m.{key_column}, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint
FROM {message} m 
WHERE m.queue = :queue AND m.priority = :priority \
  AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  AND m.next_attempt_at <= (timestamptz 'epoch' + (:now) / 1000000 * interval \
    '1 second' + (:now) % 1000000 * interval '1 microsecond') \
    AND (m.policy_marks & :before) >= :before
    AND NOT (m.deliveries_count = :final  --? others
      OR m.deliveries_count < :final \  --? others
        AND m.deliveries_count - m.attempts_count >= :losses)  --? others
  AND m.id = :only  --? one
ORDER BY m.next_attempt_at, m.id LIMIT :size
