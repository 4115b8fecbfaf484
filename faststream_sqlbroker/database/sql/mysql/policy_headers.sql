-- :rows text :queue varchar
SELECT m.id, m.headers AS headers
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id BIGINT PATH '$.id')) u \
  STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id WHERE CASE \
  WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
