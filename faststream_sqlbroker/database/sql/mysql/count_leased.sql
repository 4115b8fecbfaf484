-- Counts the leased messages of a queue up to :most, for metrics.
-- The range is one of an index, in its order, and is left as soon as the limit is reached.
-- There are no partial indexes: IS NOT NULL is the part of this one that has leases.
SELECT (SELECT count(*) FROM (SELECT 1 FROM {message} FORCE INDEX ({leased_index}) \
  WHERE queue = :queue AND lease_expires_at IS NOT NULL
  ORDER BY lease_expires_at LIMIT :most) AS found)
