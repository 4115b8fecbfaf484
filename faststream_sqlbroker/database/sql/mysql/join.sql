-- :ids in :pairs in
UPDATE {message} FORCE INDEX (PRIMARY)
SET policy_marks = policy_marks | {joined}
WHERE id IN :ids AND (id, lease_token) IN :pairs ORDER BY id
