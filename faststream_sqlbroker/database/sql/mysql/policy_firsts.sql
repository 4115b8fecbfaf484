-- :queue varchar :rows text
SELECT u.k, (
  SELECT e.id FROM {message} e FORCE INDEX ({key_index})
  WHERE e.queue = :queue AND e.`key` = u.k
    AND (e.expires_at IS NULL OR e.expires_at > UTC_TIMESTAMP(6))
  ORDER BY queue, `key`, e.id LIMIT 1
) FROM JSON_TABLE(:rows, \
  '$[*]' COLUMNS (k VARCHAR(255) CHARACTER \
  SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u
