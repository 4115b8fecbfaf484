SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END)
FROM (SELECT state FROM {message} WHERE state IN ('PENDING', 'RETRYABLE') \
  AND queue = :queue AND priority = :priority \
  AND next_attempt_at > statement_timestamp() \
  AND next_attempt_at < '{standby_time}+00' ORDER BY next_attempt_at \
  LIMIT :most) AS found
