-- variants: free
-- :ids bigint[] :tokens uuid[]
SELECT m.id FROM unnest(:ids, :tokens) AS u(id, token)
JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
ORDER BY m.id FOR UPDATE OF m  --? !free
ORDER BY m.id FOR UPDATE OF m SKIP LOCKED  --? free
