-- Counts the due messages of a queue and priority, up to `:most`. It is sent when the depth of a
-- queue is asked for.
-- The states are written out, not bound: a partial index serves only conditions that name its own.
-- The order is that of the index: nothing is sorted, and the walk ends at the limit.
SELECT count(*) FROM (SELECT 1 FROM {message}
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= {now} \
ORDER BY next_attempt_at LIMIT :most) AS found
