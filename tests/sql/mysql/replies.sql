SELECT id, queue, payload, headers, priority, `key`, attempts_count, deliveries_count, publish_count, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, UTC_TIMESTAMP(6) AS claimed_at, hops
FROM message m FORCE INDEX (message_ready)
WHERE m.claimable = 1 AND m.queue = :queue AND m.next_attempt_at <= UTC_TIMESTAMP(6)
LIMIT 500
