-- :scope1 varchar :key1 varchar
-- Reads one channel or consumer, by scope and key.
SELECT s.scope, s."key", s.info FROM {policy_state} s
WHERE s.scope = :scope1 AND s."key" = :key1
