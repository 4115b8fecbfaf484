-- Counts the messages of a queue and priority that are due later, where `sample_later` has reached
-- its limit. SQLite has no estimates, so it counts; it stops at `{max_counted}`, after some 100
-- ms.
-- What stands by is left out: a newer message of its key is delivered in its place.
-- The states are written out, not bound: a partial index serves only conditions that name its own.
SELECT count(*) FROM (SELECT 1 FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at > {now} AND next_attempt_at < {standby} \
LIMIT {max_counted}) AS found
