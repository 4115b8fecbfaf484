SELECT m.id FROM message AS m
WHERE m.id IN (__[POSTCOMPILE_ids]) AND EXISTS (
  SELECT 1 FROM pg_catalog.pg_locks AS l
  WHERE l.locktype = 'transactionid' AND l.transactionid = m.xmax
    AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid <> pg_catalog.pg_backend_pid())
