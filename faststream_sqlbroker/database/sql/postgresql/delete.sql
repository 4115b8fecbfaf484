-- :ids text :places text :tokens uuid[]
DELETE FROM {message} m USING unnest((:ids)::bigint[], (:places)::int[]) AS u(id, place)
WHERE m.id = u.id AND m.lease_token = (:tokens)[u.place]
RETURNING m.id
