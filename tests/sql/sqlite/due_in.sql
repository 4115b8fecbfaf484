SELECT (MIN(next_attempt_at) - (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)) / 1000000.0 FROM message
WHERE queue = :queue AND state IN ('PENDING', 'RETRYABLE') AND priority = :priority
