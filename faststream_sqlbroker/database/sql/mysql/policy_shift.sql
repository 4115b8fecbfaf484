-- variants: by_header
-- :rows text :mark int :kept int :queue varchar
-- Gives messages a mark, of their other marks leaves :kept, and sets a due time unless it is NULL.
-- Policies send it for what they have seen, put off, or let stand by.
-- The race: an operator's edit of the key commits after the claim has read it. So it is compared.
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
-- Text without a character set here has the database's, which may lack characters.
UPDATE JSON_TABLE(:rows, '$[*]' \
  COLUMNS (id BIGINT PATH '$.id', \
           due BIGINT PATH '$.due', \
           k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u \
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id \
SET m.next_attempt_at = \
    COALESCE((TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL u.due MICROSECOND), \
      m.next_attempt_at), \
  m.policy_marks = (m.policy_marks | :mark) & :kept \
WHERE m.queue = :queue AND m.claimable = 1 AND (u.k IS NULL OR m.{key_column} = u.k)
