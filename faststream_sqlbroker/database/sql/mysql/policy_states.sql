-- :rows text :scope varchar
-- Reads what is stored of these keys under the scope of a policy.
SELECT p.`key`, p.info
-- Text without a character set here has the database's, which may lack characters.
FROM JSON_TABLE(:rows, '$[*]' \
  COLUMNS (k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u \
STRAIGHT_JOIN {policy_state} p ON p.scope = :scope AND p.`key` = u.k
