-- variants: by_header
-- :rows text :queue varchar
-- Reads which messages may be discarded still, before they are copied and removed. SQLite has no
-- row locks: the transaction has the write lock already.
SELECT m.id \
FROM (SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.reason') AS reason, \
    json_extract(value, '$.related_id') AS related_id, json_extract(value, '$.k') AS k \
  FROM json_each(:rows)) u \
CROSS JOIN {message} m  ON m.id = u.id \
WHERE m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
  -- The race, where a database has several writers: an operator's edit of the key is committed
  -- after it was read. Bytes are compared, as another program may have written the key as bytes,
  -- which equal no text.
  AND (u.k IS NULL OR CAST(m.{key_column} AS BLOB) = CAST(u.k AS BLOB)) \
ORDER BY m.id
