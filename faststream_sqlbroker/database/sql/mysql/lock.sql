-- variants: free
-- :ids in
-- Locks messages by id, and reads which leases they have; sent before they are settled or renewed.
-- Two settlements that lock in the order of ids cannot deadlock.
-- It locks by id alone. A renewal looks first (`look`): a row whose lease was lost may be locked
-- for long by its new holder.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
SELECT id, lease_token FROM {message} FORCE INDEX (PRIMARY) \
WHERE id IN :ids \
ORDER BY id \
FOR UPDATE  --? !free
FOR UPDATE SKIP LOCKED  --? free
