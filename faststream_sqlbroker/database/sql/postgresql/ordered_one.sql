-- :id bigint
-- Reads of one message what says whether it may be claimed alone: its queue, its key, and whether
-- it has expired.
SELECT m.queue, m.key, CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END
FROM {message} m WHERE m.id = :id
