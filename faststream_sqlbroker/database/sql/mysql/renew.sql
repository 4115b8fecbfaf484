-- :ids in
UPDATE {message} FORCE INDEX (PRIMARY)
SET lease_expires_at = GREATEST(lease_expires_at, \
  UTC_TIMESTAMP(6) + INTERVAL :lease MICROSECOND)
WHERE id IN :ids
