-- :ids bigint[] :tokens uuid[]
-- Tells which leases are still held, whether their rows are locked or not.
SELECT m.id FROM unnest(:ids, :tokens) AS u(id, token)
JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
