-- :queues varchar[]
-- Tells in how many seconds the first lease in `queues` ends, of any process; NULL: there is none.
-- One descent of the index for each queue.
-- The state is a literal: with a bound one a generic plan could not use the partial index.
SELECT extract(epoch FROM min(x.ends) - statement_timestamp())::float8
FROM unnest(:queues) AS q(queue)
CROSS JOIN LATERAL (
  SELECT m.lease_expires_at AS ends FROM {message} m
  WHERE m.queue = q.queue AND m.state = 'PROCESSING'
  ORDER BY m.lease_expires_at LIMIT 1) x
