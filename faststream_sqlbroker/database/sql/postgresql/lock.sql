-- variants: free
-- :ids bigint[] :tokens uuid[]
-- Locks the rows whose leases are still held, until the transaction ends. free skips rows that
-- another transaction has locked.
-- In the order of ids, so that two transactions cannot deadlock.
SELECT m.id FROM unnest(:ids, :tokens) AS u(id, token)
JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
ORDER BY m.id FOR UPDATE OF m  --? !free
ORDER BY m.id FOR UPDATE OF m SKIP LOCKED  --? free
