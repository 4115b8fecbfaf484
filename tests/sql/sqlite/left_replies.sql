SELECT m.id
FROM message m INDEXED BY message_ready
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue AND (m.expires_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) OR :everything = 1)
LIMIT 500
