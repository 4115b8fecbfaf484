-- Counts the due messages of a queue and priority, those of them that had an attempt, and suspects,
-- up to `:most`, for what operators see.
-- `sample_all` joins several of these by UNION ALL. It removes the first word, and gives `:queue`
-- and `:priority` a number.
SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count >= {suspect_after} THEN 1 END)
-- The states are written out, not bound: a partial index serves only conditions that name its own.
-- The order is that of the index: nothing is sorted, and the walk ends at the limit.
FROM (SELECT state, attempts_count, deliveries_count FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= {now} \
ORDER BY next_attempt_at LIMIT :most) AS found
