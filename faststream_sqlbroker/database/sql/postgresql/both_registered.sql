-- :scope1 varchar :key1 varchar :scope2 varchar :key2 varchar
-- Reads two channels or consumers, such as a channel and one of its consumers.
SELECT s.scope, s.key, s.info FROM {policy_state} s
WHERE s.scope = :scope1 AND s.key = :key1
UNION ALL
SELECT s.scope, s.key, s.info FROM {policy_state} s
WHERE s.scope = :scope2 AND s.key = :key2
