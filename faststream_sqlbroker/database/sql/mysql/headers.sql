UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (
    id BIGINT PATH '$[0]', headers LONGTEXT CHARACTER SET utf8mb4 PATH '$[1]')) u
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id SET m.headers = u.headers
