-- :ids text :places text :one int :tokens uuid[]
DELETE FROM {message} m USING unnest((:ids)::bigint[], (:places)::int[]) AS u(id, place)
WHERE m.id = u.id AND (SELECT count(*)
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0
    AND m.lease_token = (:tokens)[u.place]
RETURNING m.id
