SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END)
FROM (SELECT state FROM {message} WHERE queue = :queue AND state = 'PROCESSING' \
  ORDER BY lease_expires_at LIMIT :most) AS found
