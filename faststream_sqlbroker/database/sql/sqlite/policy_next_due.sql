-- :scope varchar
SELECT MIN(p.due_at) FROM {policy_state} p
WHERE p.scope = :scope AND p.due_at > {now}
