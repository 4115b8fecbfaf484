SELECT CAST(m.policy_key AS BLOB) FROM message m INDEXED BY message_leased
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL AND m.policy_key IS NOT NULL
