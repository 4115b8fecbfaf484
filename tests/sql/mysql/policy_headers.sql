SELECT m.id, m.headers AS headers
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id BIGINT PATH '$.id')) u STRAIGHT_JOIN message m FORCE INDEX (PRIMARY) ON m.id = u.id WHERE m.queue = :queue
