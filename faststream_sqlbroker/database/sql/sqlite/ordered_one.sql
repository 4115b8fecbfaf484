-- :id bigint
-- Reads queue and key of one message that is to be claimed in order, and whether it has expired. An
-- expired one need not be the head of its key: it will not be handled.
-- The key is read as bytes: text that is not UTF-8 would fail the read.
SELECT m.queue, CAST(m."key" AS BLOB), CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END
FROM {message} m WHERE m.id = :id
