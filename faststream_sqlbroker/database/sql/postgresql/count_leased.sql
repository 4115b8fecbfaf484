SELECT (SELECT count(*) FROM (SELECT 1 FROM {message} WHERE queue = :queue \
  AND state = 'PROCESSING'
  ORDER BY lease_expires_at LIMIT :most) AS found)
