-- :ids in
-- Reads which messages have the mark of `join`. It is sent in another transaction, to learn whether
-- the one that a handler has ended was committed.
SELECT id, lease_token FROM {message} 
WHERE id IN :ids AND (policy_marks & {joined}) <> 0
