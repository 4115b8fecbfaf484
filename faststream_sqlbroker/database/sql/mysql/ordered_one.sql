-- :id bigint
-- Reads the queue and key of a message that is to be claimed by itself, for an ordered claim.
-- An expired message need not be the first of its key: it will not be handled.
SELECT m.queue, m.`key`, CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END
FROM {message} m WHERE m.id = :id
