SELECT MAX(priority) FROM message FORCE INDEX (message_ready)
WHERE claimable = 1 AND queue = :queue AND priority < :below
