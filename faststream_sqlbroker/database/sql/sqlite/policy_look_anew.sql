-- :scope varchar
UPDATE {policy_state} SET due_at = {now}
WHERE scope = :scope AND due_at > {now}
