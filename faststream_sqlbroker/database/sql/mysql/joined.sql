-- :ids in
-- Reads which rows have the mark of `join`: whether a handler's transaction was committed.
-- It is sent in another transaction, and waits until that one has ended.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
SELECT id, lease_token FROM {message} FORCE INDEX (PRIMARY)
WHERE id IN :ids AND (policy_marks & {joined}) <> 0 ORDER BY id FOR UPDATE
