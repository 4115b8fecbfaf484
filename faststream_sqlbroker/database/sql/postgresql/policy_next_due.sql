-- :scope varchar
-- Tells when the next key of `scope` is to be looked at, in microseconds since 1970 (UTC).
SELECT (extract(epoch FROM MIN(p.due_at)) * 1000000)::bigint FROM {policy_state} p
WHERE p.scope = :scope AND p.due_at > statement_timestamp()
