SELECT s.scope, s.`key`, s.info FROM message_policy_state s
WHERE s.scope = :scope1 AND s.`key` = :key1
