-- :ids in
-- Lengthens leases, after `lock`. It never shortens one: if two renewals run at once, the longer
-- one may come first.
UPDATE {message} SET lease_expires_at = max(lease_expires_at, {now} + :lease) \
WHERE id IN :ids
