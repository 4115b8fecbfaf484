-- variants: by_header
-- :queue varchar
SELECT CAST(m.{key_column} AS BLOB) FROM {message} m INDEXED BY {leased_index}
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
  AND m.{key_column} IS NOT NULL
