-- variants: by_header
-- :queue varchar
-- Reads the key of each lease of a queue, for a claim that counts leases by key.
-- The state is a literal: with a bound one a generic plan could not use the partial index.
SELECT m.{key_column} FROM {message} m 
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
  AND m.{key_column} IS NOT NULL
