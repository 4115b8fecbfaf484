SELECT k.k, (SELECT m.id FROM message m FORCE INDEX (message_policy_key)
  WHERE m.queue = :queue AND m.policy_key = k.k AND m.claimable = 1 AND m.next_attempt_at <= UTC_TIMESTAMP(6)
    AND (m.policy_marks & :mask) >= :mask ORDER BY m.id LIMIT 1) AS head
FROM (SELECT DISTINCT m.policy_key AS k FROM message m FORCE INDEX (message_policy_key)
  WHERE m.queue = :queue AND m.policy_key >= :start ORDER BY m.policy_key LIMIT :size) k
ORDER BY k.k
