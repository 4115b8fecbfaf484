-- :ids in :pairs in
-- Marks the rows of a handler's transaction, which locks them, when the transaction begins.
-- Other transactions see the mark only if this one was committed: `joined` asks for it.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
UPDATE {message} FORCE INDEX (PRIMARY)
SET policy_marks = policy_marks | {joined}
-- The pairs of id and token are the leases: a row whose lease is lost is left.
WHERE id IN :ids AND (id, lease_token) IN :pairs ORDER BY id
