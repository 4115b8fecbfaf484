-- :queue varchar :size int
-- Counts the leases of a queue up to :size, for policies that limit how many run.
-- There are no partial indexes: IS NOT NULL is the part of this one that has leases.
SELECT count(*) FROM (SELECT 1 FROM {message} m FORCE INDEX ({leased_index})
  WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
  LIMIT :size) r
