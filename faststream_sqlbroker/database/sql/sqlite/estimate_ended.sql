-- Counts a queue's archived messages where `sample_ended` has reached its limit. SQLite has no
-- estimates, so it counts; it stops at `{max_counted}`, after some 100 ms.
SELECT count(*) FROM (SELECT 1 FROM {archive} WHERE queue = :queue LIMIT {max_counted}) AS found
