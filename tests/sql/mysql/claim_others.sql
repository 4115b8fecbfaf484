SELECT id, queue, payload, headers, priority, `key`, attempts_count, deliveries_count, publish_count, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, UTC_TIMESTAMP(6) AS claimed_at, hops
FROM message FORCE INDEX (message_ready)
WHERE claimable = 1 AND queue = :queue AND priority = :priority
  AND next_attempt_at <= UTC_TIMESTAMP(6)
    AND deliveries_count - attempts_count NOT BETWEEN :losses AND :final
ORDER BY next_attempt_at, id LIMIT :limit FOR UPDATE SKIP LOCKED
