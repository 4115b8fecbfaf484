SELECT m.id, pg_current_xact_id()::text FROM unnest(:ids, :tokens) AS u(id, token)
JOIN message m ON m.id = u.id AND m.lease_token = u.token
ORDER BY m.id FOR UPDATE OF m
