-- :rows text :queue varchar
-- Gives messages the keys that were read from their headers: from now on policies go by these.
-- NOT INDEXED leaves the search by id: with an index, SQLite reads the whole queue, and all of `u`
-- for each message.
UPDATE {message} AS m NOT INDEXED \
SET policy_key = u.k, policy_marks = m.policy_marks | {header_key} \
FROM (SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.k') AS k \
  FROM json_each(:rows)) u \
WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
