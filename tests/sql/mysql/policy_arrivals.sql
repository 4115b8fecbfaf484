SELECT m.id, m.`key`, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', LEAST(m.created_at, UTC_TIMESTAMP(6))),
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END, m.attempts_count + m.deliveries_count + (m.policy_marks & 16), m.policy_marks
FROM message m FORCE INDEX (message_ready)
WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  AND m.next_attempt_at >= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL :since MICROSECOND) AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY m.next_attempt_at, m.id LIMIT :size
