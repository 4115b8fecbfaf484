-- :scope varchar
UPDATE {policy_state} SET due_at = UTC_TIMESTAMP(6)
WHERE scope = :scope AND due_at > UTC_TIMESTAMP(6)
