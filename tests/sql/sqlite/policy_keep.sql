INSERT INTO message_policy_state (scope, "key", info, expires_at)
SELECT :scope, u.k, u.info, u.expires FROM (SELECT json_extract(value, '$.k') AS k, json_extract(value, '$.info') AS info, json_extract(value, '$.expires') AS expires FROM json_each(:rows)) u
WHERE true ON CONFLICT (scope, "key") DO UPDATE SET info = excluded.info, expires_at = excluded.expires_at
