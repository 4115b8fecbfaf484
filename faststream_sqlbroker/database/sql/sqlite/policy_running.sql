-- :queue varchar :size int
-- Counts the leases of a queue, up to `:size`, for policies that limit them.
SELECT count(*) FROM (SELECT 1 FROM {message} m INDEXED BY {leased_index}
  WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
  LIMIT :size) r
