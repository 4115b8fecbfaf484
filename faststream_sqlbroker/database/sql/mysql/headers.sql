-- Gives messages that move to another queue their new headers, after `update`; few have any.
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (
    -- Text without a character set here has the database's, and loses what that cannot hold.
    id BIGINT PATH '$[0]', headers LONGTEXT CHARACTER SET utf8mb4 PATH '$[1]')) u
-- Without the hint the server scans a small table, and waits for rows that others have locked.
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id \
SET m.headers = u.headers
