-- :scope1 varchar :key1 varchar
-- Reads a channel, a consumer, or what is known of a queue's token.
SELECT s.scope, s.`key`, s.info FROM {policy_state} s
WHERE s.scope = :scope1 AND s.`key` = :key1
