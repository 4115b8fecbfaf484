-- variants: by_header
-- :rows text :queue varchar
SELECT m.id FROM (SELECT json_extract(value, '$.id') AS id, json_extract(value, \
  '$.reason') AS reason, json_extract(value, \
  '$.related_id') AS related_id, json_extract(value, \
  '$.k') AS k FROM json_each(:rows)) u CROSS JOIN {message} m  ON m.id = u.id \
  WHERE m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
  AND (u.k IS NULL OR CAST(m.{key_column} AS BLOB) = CAST(u.k AS BLOB)) ORDER BY m.id
