SELECT id FROM message FORCE INDEX (message_leased)
WHERE queue IN (__[POSTCOMPILE_queues]) AND lease_expires_at IS NOT NULL AND lease_token = :token
