-- :ids bigint[] :tokens uuid[]
SELECT m.id FROM unnest(:ids, :tokens) AS u(id, token)
JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
