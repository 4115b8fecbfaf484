-- variants: by_header
-- :queue varchar
SELECT m.{key_column} FROM {message} m FORCE INDEX ({leased_index})
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
  AND m.{key_column} IS NOT NULL
