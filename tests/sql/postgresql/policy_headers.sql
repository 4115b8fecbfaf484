SELECT m.id, m.headers AS headers
FROM json_to_recordset((:rows)::json) AS u(id bigint) JOIN message m  ON m.id = u.id WHERE m.queue = :queue
