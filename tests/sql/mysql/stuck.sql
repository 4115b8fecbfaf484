SELECT id FROM message FORCE INDEX (message_leased)
WHERE queue IN (__[POSTCOMPILE_queues]) AND lease_expires_at < COALESCE(CAST(:before AS DATETIME(6)), UTC_TIMESTAMP(6))
LIMIT :limit FOR UPDATE SKIP LOCKED
