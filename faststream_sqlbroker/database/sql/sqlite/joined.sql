-- :ids in
SELECT id, lease_token FROM {message} 
WHERE id IN :ids AND (policy_marks & {joined}) <> 0
