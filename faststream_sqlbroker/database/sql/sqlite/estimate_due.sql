-- Counts the due messages of a queue and priority where `sample_due` has reached its limit. SQLite
-- has no estimates, so it counts; it stops at `{max_counted}`, after some 100 ms.
-- The states are written out, not bound: a partial index serves only conditions that name its own.
SELECT count(*) FROM (SELECT 1 FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= {now} \
LIMIT {max_counted}) AS found
