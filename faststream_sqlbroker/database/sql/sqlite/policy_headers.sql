-- :rows text :queue varchar
-- Reads the headers of messages, for the keys in them, and for what is told of decisions.
-- They are read as bytes: text that is not UTF-8 would fail the read.
-- No index serves a CASE: the messages are searched by their ids, never by the queue.
SELECT m.id, CAST(m.headers AS BLOB) AS headers
FROM (SELECT json_extract(value, '$.id') AS id FROM json_each(:rows)) u \
CROSS JOIN {message} m  ON m.id = u.id \
WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
