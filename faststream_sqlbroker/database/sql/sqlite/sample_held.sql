-- Counts a queue's leased messages, those of them that had an attempt before, and suspects, up to
-- `:most`, for what operators see.
-- `sample_all` joins several of these by UNION ALL. It removes the first word, and gives `:queue` a
-- number.
SELECT count(*), count(CASE WHEN attempts_count > 0 THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count > {suspect_after} THEN 1 END)
-- The state is written out, not bound: a partial index serves only conditions that name its own.
-- The order is that of the index: nothing is sorted, and the walk ends at the limit.
FROM (SELECT attempts_count, deliveries_count FROM {message} \
WHERE queue = :queue AND state = 'PROCESSING' \
ORDER BY lease_expires_at LIMIT :most) AS found
