-- :scope varchar
-- Reads when the next key of a policy is to be looked at, later than now.
SELECT MIN(p.due_at) FROM {policy_state} p
WHERE p.scope = :scope AND p.due_at > {now}
