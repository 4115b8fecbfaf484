-- :scope varchar :rows text
-- Stores what a policy knows of keys, when it may be forgotten, and when each is to be looked at.
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
-- Text without a character set here has the database's, which may lack characters.
INSERT INTO {policy_state} (scope, `key`, info, expires_at, due_at)
SELECT :scope, u.k, u.info, \
  (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL u.expires MICROSECOND), \
  (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL u.due MICROSECOND) \
FROM JSON_TABLE(:rows, '$[*]' \
  COLUMNS (k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k', \
           info LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.info', \
           expires BIGINT PATH '$.expires', \
           due BIGINT PATH '$.due')) u
ON DUPLICATE KEY UPDATE info = u.info, \
  expires_at = (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL u.expires MICROSECOND), \
  due_at = (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL u.due MICROSECOND)
