-- :queue varchar :size int
-- Counts the leases of a queue, up to `size`, under its lock. There is no counter that a crash
-- could leave too high.
-- The state is a literal: with a bound one a generic plan could not use the partial index.
SELECT count(*) FROM (SELECT 1 FROM {message} m 
  WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
  LIMIT :size) r
