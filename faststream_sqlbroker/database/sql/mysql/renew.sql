-- :ids in
-- Lengthens the leases of messages that `lock` has locked.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
UPDATE {message} FORCE INDEX (PRIMARY)
-- A lease is never shortened: of two renewals at once, the longer one may be executed first.
SET lease_expires_at = \
  GREATEST(lease_expires_at, UTC_TIMESTAMP(6) + INTERVAL :lease MICROSECOND)
WHERE id IN :ids
