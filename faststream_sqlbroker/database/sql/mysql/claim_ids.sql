-- :ids in :queues in
-- Locks and reads those of these messages that are due and free; `claim_update` leases them.
-- Claims that choose messages first send it: of one message, of heads of keys, of many queues.
SELECT {claimed}
-- Without the hint the server scans a small table, and waits for rows that others have locked.
FROM {message} FORCE INDEX (PRIMARY)
WHERE claimable = 1 AND id IN :ids AND queue IN :queues
  AND next_attempt_at <= UTC_TIMESTAMP(6)
ORDER BY next_attempt_at, id LIMIT :limit FOR UPDATE SKIP LOCKED
