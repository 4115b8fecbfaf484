-- :ids text :places text :tokens uuid[]
-- `delete` that writes nothing unless it runs in the transaction of that number: a handler may have
-- ended the one that it was given.
DELETE FROM {message} m USING unnest((:ids)::bigint[], (:places)::int[]) AS u(id, place)
WHERE m.id = u.id \
  AND pg_current_xact_id_if_assigned() = (:transaction)::text::xid8 \
  AND m.lease_token = (:tokens)[u.place]
RETURNING m.id
