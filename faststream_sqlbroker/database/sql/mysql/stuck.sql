-- :queues in
-- Locks messages whose lease ended before that moment, or by now; `release_stuck` gives them back.
-- The queues are constants: with a join MySQL would read all rows of a queue without a lease.
-- A handler's transaction keeps its row locked for long. Such a row is skipped.
SELECT id FROM {message} FORCE INDEX ({leased_index})
WHERE queue IN :queues \
  AND lease_expires_at < COALESCE(CAST(:before AS DATETIME(6)), UTC_TIMESTAMP(6))
LIMIT :limit FOR UPDATE SKIP LOCKED
