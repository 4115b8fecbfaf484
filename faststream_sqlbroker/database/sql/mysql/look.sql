-- :ids in
SELECT id, lease_token FROM {message} FORCE INDEX (PRIMARY) WHERE id IN :ids
