SELECT m.id, m.state, m.next_attempt_at, m.acquired_at,
  CAST(m."key" AS BLOB)
FROM (SELECT json_extract(value, '$.id') AS id FROM json_each(:rows)) u CROSS JOIN message m  ON m.id = u.id WHERE m.queue = :queue
