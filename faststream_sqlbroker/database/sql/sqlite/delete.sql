-- :ids in
DELETE FROM {message} WHERE id IN :ids
