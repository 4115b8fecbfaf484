SELECT m.policy_key FROM message m FORCE INDEX (message_leased)
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL AND m.policy_key IS NOT NULL
