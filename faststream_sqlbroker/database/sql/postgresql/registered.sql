-- :scope1 varchar :key1 varchar
-- Reads a channel or a consumer.
SELECT s.scope, s.key, s.info FROM {policy_state} s
WHERE s.scope = :scope1 AND s.key = :key1
