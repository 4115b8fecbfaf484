-- variants: by_header
-- :rows text :queue varchar
SELECT m.id FROM (SELECT * \
  FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id BIGINT PATH '$.id', \
  reason LONGTEXT CHARACTER \
  SET utf8mb4 COLLATE utf8mb4_bin PATH '$.reason', \
  related_id BIGINT PATH '$.related_id', k VARCHAR(255) CHARACTER \
  SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u) u STRAIGHT_JOIN {message} m \
  FORCE INDEX (PRIMARY) ON m.id = u.id WHERE m.queue = :queue AND m.claimable = 1
  AND (u.k IS NULL OR m.{key_column} = u.k) ORDER BY m.id FOR UPDATE
