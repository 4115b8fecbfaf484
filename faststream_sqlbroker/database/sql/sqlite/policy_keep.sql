-- :scope varchar :rows text
-- Stores what a policy knows of keys, when it may be forgotten, and when to look at each key again.
INSERT INTO {policy_state} (scope, "key", info, expires_at, due_at)
SELECT :scope, u.k, u.info, u.expires, u.due \
FROM (SELECT json_extract(value, '$.k') AS k, json_extract(value, '$.info') AS info, \
    json_extract(value, '$.expires') AS expires, json_extract(value, '$.due') AS due \
  FROM json_each(:rows)) u
-- Without a WHERE, SQLite would read ON as the condition of a join.
WHERE true \
ON CONFLICT (scope, "key") DO UPDATE \
  SET info = excluded.info, expires_at = excluded.expires_at, due_at = excluded.due_at
