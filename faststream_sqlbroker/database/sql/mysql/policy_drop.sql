-- :rows text :queue varchar
DELETE m FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id BIGINT PATH '$.id', \
  reason LONGTEXT CHARACTER \
  SET utf8mb4 COLLATE utf8mb4_bin PATH '$.reason', \
  related_id BIGINT PATH '$.related_id', k VARCHAR(255) CHARACTER \
  SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u STRAIGHT_JOIN {message} m \
  FORCE INDEX (PRIMARY) ON m.id = u.id WHERE m.queue = :queue AND m.claimable = 1
