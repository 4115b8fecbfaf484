-- variants: by_header
-- :mark int :kept int :rows text :queue varchar
-- Gives messages a mark of a policy, leaves the marks `:kept`, and writes another due time, unless
-- that is NULL.
-- NOT INDEXED leaves the search by id: with an index, SQLite reads the whole queue, and all of `u`
-- for each message.
-- The race, where a database has several writers: an operator's edit of the key is committed after
-- it was read. Bytes are compared, as another program may have written the key as bytes, which
-- equal no text.
UPDATE {message} AS m NOT INDEXED \
SET next_attempt_at = COALESCE(u.due, m.next_attempt_at), \
  policy_marks = (m.policy_marks | :mark) & :kept \
FROM (SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.due') AS due, \
    json_extract(value, '$.k') AS k \
  FROM json_each(:rows)) u \
WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE') \
  AND (u.k IS NULL OR CAST(m.{key_column} AS BLOB) = CAST(u.k AS BLOB))
