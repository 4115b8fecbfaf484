-- Counts the leased messages of a queue, up to `:most`, for metrics.
-- The state is written out, not bound: a partial index serves only conditions that name its own.
-- The order is that of the index: nothing is sorted, and the walk ends at the limit.
SELECT (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE queue = :queue AND state = 'PROCESSING'
  ORDER BY lease_expires_at LIMIT :most) AS found)
