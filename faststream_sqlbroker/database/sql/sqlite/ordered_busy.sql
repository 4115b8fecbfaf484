-- variants: by_header
-- :queue varchar
-- Reads the keys that have leases, once for each lease, so that no more of their messages start
-- than may.
-- Keys are read as bytes: text that is not UTF-8 would fail the read.
SELECT CAST(m.{key_column} AS BLOB) FROM {message} m INDEXED BY {leased_index}
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL \
  AND m.{key_column} IS NOT NULL
