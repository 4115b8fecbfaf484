-- :scope varchar
-- Lets every key of a policy that is to be looked at later be looked at now.
-- A process sends it once: another rate may have written when the keys are to be looked at.
UPDATE {policy_state} SET due_at = UTC_TIMESTAMP(6)
WHERE scope = :scope AND due_at > UTC_TIMESTAMP(6)
