-- :rows text :queue varchar
-- Removes messages that a policy discards. It is sent after `policy_lock`, and after
-- `policy_archive` if they are kept.
-- NOT INDEXED leaves the search by id: with an index, SQLite reads the whole queue.
DELETE FROM {message} AS m NOT INDEXED \
WHERE m.id IN (SELECT u.id \
    FROM (SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.reason') AS reason, \
        json_extract(value, '$.related_id') AS related_id, json_extract(value, '$.k') AS k \
      FROM json_each(:rows)) u) \
  AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
