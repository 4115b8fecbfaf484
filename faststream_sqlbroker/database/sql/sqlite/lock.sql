-- variants: free
-- :ids in
-- Reads the leases that messages have, before they are written. SQLite has no row locks, and the
-- transaction has the write lock already: nothing is to be locked, or skipped as locked.
SELECT id, lease_token FROM {message} WHERE id IN :ids
