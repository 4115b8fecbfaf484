-- variants: by_header
-- :queue varchar
-- Reads the key of each lease of a queue, for claims in order or by key.
-- A key may have one lease at a time, or as many as its policy allows.
-- There are no partial indexes: IS NOT NULL is the part of this one that has leases.
SELECT m.{key_column} FROM {message} m FORCE INDEX ({leased_index})
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
  AND m.{key_column} IS NOT NULL
