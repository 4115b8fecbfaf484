-- :id bigint
SELECT m.queue, m.`key`, CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END
FROM {message} m WHERE m.id = :id
