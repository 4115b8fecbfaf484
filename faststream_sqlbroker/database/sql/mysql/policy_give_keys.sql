-- :rows text :queue varchar
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (id BIGINT PATH '$.id', \
  k VARCHAR(255) CHARACTER \
  SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u STRAIGHT_JOIN {message} m \
  FORCE INDEX (PRIMARY) ON m.id = u.id \
  SET m.policy_key = u.k, m.policy_marks = m.policy_marks | {header_key} \
  WHERE m.queue = :queue AND m.claimable = 1
