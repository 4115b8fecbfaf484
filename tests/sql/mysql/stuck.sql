SELECT id FROM message FORCE INDEX (message_leased)
WHERE queue = :queue AND lease_expires_at < UTC_TIMESTAMP(6)
ORDER BY lease_expires_at LIMIT :limit FOR UPDATE SKIP LOCKED
