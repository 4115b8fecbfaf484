-- variants: by_header, one, one by_header, others, others by_header
-- :queue varchar :priority smallint :now bigint :before int :size int :final int :losses int
-- :only bigint
SELECT m.id, m.{key_column}, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at)
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 \
  AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  AND m.next_attempt_at <= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL :now \
    MICROSECOND) AND (m.policy_marks & :before) >= :before
    AND NOT (m.deliveries_count = :final  --? others
      OR m.deliveries_count < :final \  --? others
        AND m.deliveries_count - m.attempts_count >= :losses)  --? others
  AND m.id = :only  --? one
ORDER BY m.next_attempt_at, m.id LIMIT :size
