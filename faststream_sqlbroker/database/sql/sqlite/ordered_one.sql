-- :id bigint
SELECT m.queue, CAST(m."key" AS BLOB), CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END
FROM {message} m WHERE m.id = :id
