-- :scope varchar
-- Reads when the next key of a policy is to be looked at, later than now (microseconds since 1970).
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', MIN(p.due_at)) FROM {policy_state} p
WHERE p.scope = :scope AND p.due_at > UTC_TIMESTAMP(6)
