SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(next_attempt_at)) / 1000000
FROM message FORCE INDEX (message_ready)
WHERE claimable = 1 AND queue = :queue AND priority = :priority
