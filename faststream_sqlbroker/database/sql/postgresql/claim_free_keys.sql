-- :ids bigint[] :tokens uuid[] :scopes varchar[] :keys varchar[] :deliveries uuid[] :infos text[]
-- :kept float
WITH held AS MATERIALIZED (
  SELECT m.id, u.scope, u.key, u.delivery, u.info
  FROM unnest(:ids, :tokens, :scopes, :keys, :deliveries, :infos)
    AS u(id, token, scope, key, delivery, info)
  JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
  ORDER BY m.id FOR UPDATE OF m
)
INSERT INTO {policy_state} (scope, key, lease_token, info, created_at, expires_at)
SELECT DISTINCT ON (h.scope COLLATE "C", h.key COLLATE "C") h.scope, h.key, h.delivery,
  h.info::jsonb, statement_timestamp(), \
    statement_timestamp() + :kept * interval '1 second'
FROM held h ORDER BY h.scope COLLATE "C", h.key COLLATE "C", h.id
ON CONFLICT (scope, key) DO NOTHING
RETURNING (info->>'message')::bigint
