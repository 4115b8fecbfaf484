-- :ids in :queues in
SELECT {claimed}
FROM {message} FORCE INDEX (PRIMARY)
WHERE claimable = 1 AND id IN :ids AND queue IN :queues
  AND next_attempt_at <= UTC_TIMESTAMP(6)
ORDER BY next_attempt_at, id LIMIT :limit FOR UPDATE SKIP LOCKED
