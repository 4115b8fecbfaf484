SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END)
FROM (SELECT state FROM {message} FORCE INDEX ({ready_index}) WHERE claimable = 1 \
  AND queue = :queue AND priority = :priority AND next_attempt_at <= UTC_TIMESTAMP(6) \
  ORDER BY next_attempt_at LIMIT :most) AS found
