-- :scope varchar
-- Lets every key that is to be looked at later be looked at now: another rate may have written
-- when. It is sent once by a process, which has one rate.
UPDATE {policy_state} SET due_at = {now}
WHERE scope = :scope AND due_at > {now}
