-- :id bigint
SELECT m.queue, m.key, CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END
FROM {message} m WHERE m.id = :id
