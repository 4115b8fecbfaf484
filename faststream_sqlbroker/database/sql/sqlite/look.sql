-- :ids in
-- Reads the leases that messages have, to tell which are still held.
SELECT id, lease_token FROM {message} WHERE id IN :ids
