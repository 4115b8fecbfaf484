-- variants: by_header
-- :queue varchar :priority smallint :since bigint :before int :own int :size int
SELECT m.id, m.{key_column}, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at), \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', LEAST(m.created_at, UTC_TIMESTAMP(6))),
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 \
    ELSE 0 END, m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), \
    m.policy_marks
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 \
  AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  AND m.next_attempt_at >= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL :since \
    MICROSECOND) AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY m.next_attempt_at, m.id LIMIT :size
