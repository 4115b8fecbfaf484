SELECT m.id, m.policy_key, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at)
FROM message m FORCE INDEX (message_ready)
WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  AND m.next_attempt_at <= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL :now MICROSECOND) AND (m.policy_marks & :before) >= :before
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
ORDER BY m.next_attempt_at, m.id LIMIT :size
