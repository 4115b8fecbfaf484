SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END)
FROM (SELECT state FROM {message} FORCE INDEX ({leased_index}) WHERE queue = :queue \
  AND lease_expires_at IS NOT NULL ORDER BY lease_expires_at LIMIT :most) AS found
