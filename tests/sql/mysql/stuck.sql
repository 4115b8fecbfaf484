SELECT id FROM message FORCE INDEX (message_leased)
WHERE queue IN (__[POSTCOMPILE_queues]) AND lease_expires_at < UTC_TIMESTAMP(6)
LIMIT :limit FOR UPDATE SKIP LOCKED
