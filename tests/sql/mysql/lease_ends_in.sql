SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(lease_expires_at)) / 1000000
FROM message FORCE INDEX (message_leased)
WHERE queue IN (__[POSTCOMPILE_queues]) AND lease_expires_at IS NOT NULL
