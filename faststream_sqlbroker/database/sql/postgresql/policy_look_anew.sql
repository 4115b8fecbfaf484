-- :scope varchar
-- Lets every key of `scope` that is to be looked at later be looked at now: a Throttle of another
-- rate may have written when.
UPDATE {policy_state} SET due_at = statement_timestamp()
WHERE scope = :scope AND due_at > statement_timestamp()
