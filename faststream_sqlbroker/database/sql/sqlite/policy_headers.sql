-- :rows text :queue varchar
SELECT m.id, CAST(m.headers AS BLOB) AS headers
FROM (SELECT json_extract(value, '$.id') AS id FROM json_each(:rows)) u CROSS \
  JOIN {message} m  ON m.id = u.id WHERE CASE WHEN m.queue = :queue THEN 1 \
  ELSE 0 END = 1
