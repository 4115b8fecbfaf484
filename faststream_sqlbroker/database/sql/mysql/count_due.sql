SELECT count(*) FROM (SELECT 1 FROM {message} FORCE INDEX ({ready_index})
WHERE claimable = 1 AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= UTC_TIMESTAMP(6) ORDER BY next_attempt_at LIMIT :most) AS found
