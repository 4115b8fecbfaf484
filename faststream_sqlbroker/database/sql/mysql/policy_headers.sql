-- :rows text :queue varchar
-- Reads the headers of messages as they are stored: for their keys, or to tell what was decided.
SELECT m.id, m.headers AS headers
-- No index serves a CASE: only the ids can find the rows, not the queue.
-- Without the hint the server scans a small table.
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id BIGINT PATH '$.id')) u \
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id \
WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
