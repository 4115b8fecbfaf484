-- :ids bigint[]
-- Deletes messages, whatever their state, and keeps nothing of them: replies that were read or are
-- left. Rows that others have locked are waited for.
DELETE FROM {message} m WHERE m.id = ANY(:ids)
