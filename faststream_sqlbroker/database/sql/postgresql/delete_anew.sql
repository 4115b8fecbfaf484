-- :ids text :places text :one int :tokens uuid[]
-- `delete` for one message, planned anew each time: a session may keep a plan from a time when the
-- table was empty, which reads the whole table.
DELETE FROM {message} m USING unnest((:ids)::bigint[], (:places)::int[]) AS u(id, place)
-- The count always holds (`one` is 1). Without the value the planner expects a million rows of the
-- two series, so a generic plan always seems to cost more.
WHERE m.id = u.id \
    AND (SELECT count(*)
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0
    AND m.lease_token = (:tokens)[u.place]
RETURNING m.id
