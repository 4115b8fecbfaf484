SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count >= 2 THEN 1 END)
FROM (SELECT state, attempts_count, deliveries_count FROM message FORCE INDEX (message_ready) WHERE claimable = 1 AND queue = :queue AND priority = :priority AND next_attempt_at <= UTC_TIMESTAMP(6) ORDER BY next_attempt_at LIMIT :most) AS found
