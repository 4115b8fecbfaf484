SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count >= 2 THEN 1 END)
FROM (SELECT state, attempts_count, deliveries_count FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) ORDER BY next_attempt_at LIMIT :most) AS found
