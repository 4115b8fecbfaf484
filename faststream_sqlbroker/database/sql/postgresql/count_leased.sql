-- Counts the leased messages of a queue, up to `most`, for metrics.
-- In the order of the index: else PostgreSQL may read the table from its begin, in the hope of many
-- messages of the queue, and so messages of other queues without a limit.
-- The state is a literal: partial indexes serve only conditions that name their own.
SELECT (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE queue = :queue AND state = 'PROCESSING'
  ORDER BY lease_expires_at LIMIT :most) AS found)
