-- :ids in
SELECT id, lease_token FROM {message} FORCE INDEX (PRIMARY)
WHERE id IN :ids AND (policy_marks & {joined}) <> 0 ORDER BY id FOR UPDATE
