-- :rows text :queue varchar
-- Reads the headers of messages as they are stored, for keys that are in headers and to tell what
-- was decided. The list is one JSON bind, so the text never changes.
SELECT m.id, m.headers AS headers
-- Trap: without fresh statistics PostgreSQL would find the rows by the queue, and read all of it.
-- No index serves a CASE.
FROM json_to_recordset((:rows)::json) AS u(id bigint) \
  JOIN {message} m  ON m.id = u.id \
WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
