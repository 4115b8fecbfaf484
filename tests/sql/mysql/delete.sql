DELETE m FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id BIGINT PATH '$')) u
STRAIGHT_JOIN message m ON m.id = u.id
