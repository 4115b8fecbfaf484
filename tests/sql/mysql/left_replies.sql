SELECT m.id
FROM message m FORCE INDEX (message_ready)
WHERE m.claimable = 1 AND m.queue = :queue AND (m.expires_at < UTC_TIMESTAMP(6) OR :everything = 1)
LIMIT 500
