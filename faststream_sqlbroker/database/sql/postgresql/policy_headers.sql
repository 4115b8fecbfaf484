-- :rows text :queue varchar
SELECT m.id, m.headers AS headers
FROM json_to_recordset((:rows)::json) AS u(id bigint) JOIN {message} m  ON m.id = u.id \
  WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
