-- :ids bigint[]
DELETE FROM {message} m WHERE m.id = ANY(:ids)
