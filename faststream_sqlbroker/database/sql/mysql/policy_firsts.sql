-- :queue varchar :rows text
-- Reads the first live message of each of these keys, for `broker.admin.policies`.
-- One row of the index for each key: no database makes a join of a subquery with a limit, and with
-- the index's own order MySQL does not sort. An expired message blocks no other.
SELECT u.k, (
  SELECT e.id FROM {message} e FORCE INDEX ({key_index})
  WHERE e.queue = :queue AND e.`key` = u.k
    AND (e.expires_at IS NULL OR e.expires_at > UTC_TIMESTAMP(6))
  ORDER BY queue, `key`, e.id LIMIT 1
-- Text without a character set here has the database's, which may lack characters.
) FROM JSON_TABLE(:rows, '$[*]' \
  COLUMNS (k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u
