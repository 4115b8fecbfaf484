-- :rows text :queue varchar
-- Removes messages that policies end; sent after `policy_lock`, of exactly what that has locked.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
-- Text without a character set here has the database's, which may lack characters.
DELETE m \
FROM JSON_TABLE(:rows, '$[*]' \
  COLUMNS (id BIGINT PATH '$.id', \
           reason LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.reason', \
           related_id BIGINT PATH '$.related_id', \
           k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u \
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id \
WHERE m.queue = :queue AND m.claimable = 1
