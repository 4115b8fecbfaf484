SELECT s.scope, s."key", s.info FROM message_policy_state s
WHERE s.scope = :scope1 AND s."key" = :key1
UNION ALL
SELECT s.scope, s."key", s.info FROM message_policy_state s
WHERE s.scope = :scope2 AND s."key" = :key2
