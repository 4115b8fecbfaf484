-- variants: by_header
-- :rows text :queue varchar
-- Locks those messages that policies end; then exactly these are archived and removed.
-- A row that another transaction takes in between must not be copied.
-- MySQL refuses to lock the rows of a JSON_TABLE (error 3569), unless it is in a subquery.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
-- Text without a character set here has the database's, which may lack characters.
SELECT m.id \
FROM (SELECT * FROM JSON_TABLE(:rows, '$[*]' \
  COLUMNS (id BIGINT PATH '$.id', \
           reason LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.reason', \
           related_id BIGINT PATH '$.related_id', \
           k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u) u \
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id \
WHERE m.queue = :queue AND m.claimable = 1
  -- The race: an operator's edit of the key commits after the claim has read it. So it is compared.
  AND (u.k IS NULL OR m.{key_column} = u.k) \
ORDER BY m.id FOR UPDATE
