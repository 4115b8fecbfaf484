-- :ids in
UPDATE {message} FORCE INDEX (PRIMARY)
SET state = 'PROCESSING', acquired_at = :now, lease_token = :token,
  lease_expires_at = UTC_TIMESTAMP(6) + INTERVAL :lease MICROSECOND, \
    deliveries_count = deliveries_count + 1
WHERE id IN :ids
