-- :rows text :queue varchar
-- Gives messages the key that was read from their headers: policies go by it from now on.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
-- Text without a character set here has the database's, which may lack characters.
UPDATE JSON_TABLE(:rows, '$[*]' \
  COLUMNS (id BIGINT PATH '$.id', \
           k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u \
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id \
SET m.policy_key = u.k, m.policy_marks = m.policy_marks | {header_key} \
WHERE m.queue = :queue AND m.claimable = 1
