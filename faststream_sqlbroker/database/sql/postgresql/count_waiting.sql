SELECT (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= statement_timestamp()
  ORDER BY next_attempt_at LIMIT :most_due) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM {message} \
    WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue \
    AND priority = :priority AND next_attempt_at > statement_timestamp() \
    AND next_attempt_at < '{standby_time}+00'
  ORDER BY next_attempt_at LIMIT :most_later) AS found)
