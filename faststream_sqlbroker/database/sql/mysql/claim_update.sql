-- :ids in
-- Leases the messages that `claim` or `claim_ids` has locked.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
UPDATE {message} FORCE INDEX (PRIMARY)
-- The database's time is the one that the claim has read: the row has what the caller knows.
SET state = 'PROCESSING', acquired_at = :now, lease_token = :token,
  lease_expires_at = UTC_TIMESTAMP(6) + INTERVAL :lease MICROSECOND, \
  deliveries_count = deliveries_count + 1
WHERE id IN :ids
