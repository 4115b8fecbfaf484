-- :scope varchar
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', MIN(p.due_at)) FROM {policy_state} p
WHERE p.scope = :scope AND p.due_at > UTC_TIMESTAMP(6)
