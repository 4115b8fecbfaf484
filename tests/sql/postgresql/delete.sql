DELETE FROM message m USING unnest(:ids, :tokens) AS u(id, token)
WHERE m.id = u.id AND m.lease_token = u.token
RETURNING m.id
