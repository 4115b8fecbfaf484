-- :scope varchar
UPDATE {policy_state} SET due_at = statement_timestamp()
WHERE scope = :scope AND due_at > statement_timestamp()
