-- :ids bigint[] :tokens uuid[] :scopes varchar[] :keys varchar[] :deliveries uuid[] :infos text[]
-- :kept float
-- Claims, for messages that are leased, those keys of policy Once that no other message has.
-- Messages are locked first, then keys in sorted order, as `database.parts.once` locks them: so the two
-- cannot deadlock. "C" is Python's order, whatever the database's is.
WITH held AS MATERIALIZED (
  SELECT m.id, u.scope, u.key, u.delivery, u.info
  FROM unnest(:ids, :tokens, :scopes, :keys, :deliveries, :infos)
    AS u(id, token, scope, key, delivery, info)
  JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
  ORDER BY m.id FOR UPDATE OF m
)
INSERT INTO {policy_state} (scope, key, lease_token, info, created_at, expires_at)
SELECT DISTINCT ON (h.scope COLLATE "C", h.key COLLATE "C") h.scope, h.key, h.delivery,
  h.info::jsonb, statement_timestamp(), statement_timestamp() + :kept * interval '1 second'
FROM held h ORDER BY h.scope COLLATE "C", h.key COLLATE "C", h.id
-- A key that is there, or is inserted by another transaction at this moment, is left to that.
ON CONFLICT (scope, key) DO NOTHING
RETURNING (info->>'message')::bigint
