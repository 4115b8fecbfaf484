SELECT m.id, m.`key` FROM message m FORCE INDEX (PRIMARY)
WHERE m.id IN (__[POSTCOMPILE_ids]) AND CASE WHEN m.claimable = 1 AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  AND (m.policy_marks & :mask) >= :mask
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final THEN 1 ELSE 0 END = 1
ORDER BY m.priority DESC, m.next_attempt_at, m.id
