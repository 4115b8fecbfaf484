-- Removes messages that have ended, or replies that were read, by id.
-- By IN it would scan a small table: a DELETE of one table takes no hint.
DELETE m FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id BIGINT PATH '$')) u
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id
