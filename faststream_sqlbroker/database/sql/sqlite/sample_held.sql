-- Counts a queue's leased messages, up to `:most`, for what operators see.
-- `sample_all` joins several of these by UNION ALL. It removes the first word, and gives `:queue` a
-- number.
SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END)
-- The state is written out, not bound: a partial index serves only conditions that name its own.
-- The order is that of the index: nothing is sorted, and the walk ends at the limit.
FROM (SELECT state FROM {message} \
WHERE queue = :queue AND state = 'PROCESSING' \
ORDER BY lease_expires_at LIMIT :most) AS found
