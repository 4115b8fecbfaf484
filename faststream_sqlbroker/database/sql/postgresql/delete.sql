-- :ids text :places text :tokens uuid[]
-- Ends deliveries whose messages leave the queue and are not kept: deletes each row whose lease is
-- still held.
-- Numbers go as the text of an array, which asyncpg sends as it is: each element of an array costs
-- it time. Messages of one claim share a token, so `places` says which of `tokens` is whose.
DELETE FROM {message} m USING unnest((:ids)::bigint[], (:places)::int[]) AS u(id, place)
WHERE m.id = u.id AND m.lease_token = (:tokens)[u.place]
RETURNING m.id
