-- Counts a queue's leased messages where `sample_held` has reached its limit. SQLite has no
-- estimates, so it counts; it stops at `{max_counted}`, after some 100 ms.
-- The state is written out, not bound: a partial index serves only conditions that name its own.
SELECT count(*) FROM (SELECT 1 FROM {message} \
WHERE queue = :queue AND state = 'PROCESSING' \
LIMIT {max_counted}) AS found
