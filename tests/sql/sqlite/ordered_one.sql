SELECT m.queue, CAST(m."key" AS BLOB) FROM message m WHERE m.id = :id
