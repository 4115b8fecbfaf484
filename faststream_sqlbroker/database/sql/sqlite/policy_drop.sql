-- :rows text :queue varchar
DELETE FROM {message} AS m NOT INDEXED \
  WHERE m.id IN (SELECT u.id \
  FROM (SELECT json_extract(value, '$.id') AS id, json_extract(value, \
  '$.reason') AS reason, json_extract(value, \
  '$.related_id') AS related_id, json_extract(value, \
  '$.k') AS k FROM json_each(:rows)) u) AND m.queue = :queue \
  AND m.state IN ('PENDING', 'RETRYABLE')
