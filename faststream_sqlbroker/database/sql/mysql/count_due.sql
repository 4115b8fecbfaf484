-- Counts the due messages of a queue and a priority, up to :most.
-- The range is one of an index, in its order, and is left as soon as the limit is reached.
-- `claimable`, which leads the index, is 1 or NULL.
SELECT count(*) FROM (SELECT 1 FROM {message} FORCE INDEX ({ready_index})
WHERE claimable = 1 AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= UTC_TIMESTAMP(6) \
ORDER BY next_attempt_at LIMIT :most) AS found
