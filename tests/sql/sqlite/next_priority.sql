SELECT MAX(priority) FROM message
WHERE queue = :queue AND state IN ('PENDING', 'RETRYABLE') AND priority < :below
