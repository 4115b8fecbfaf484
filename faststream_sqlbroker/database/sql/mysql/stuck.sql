-- :queues in
SELECT id FROM {message} FORCE INDEX ({leased_index})
WHERE queue IN :queues \
  AND lease_expires_at < COALESCE(CAST(:before AS DATETIME(6)), UTC_TIMESTAMP(6))
LIMIT :limit FOR UPDATE SKIP LOCKED
