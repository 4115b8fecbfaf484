-- :ids in
-- A row that is locked names the transaction, which holds a lock on its own number until it ends.
-- Nothing is locked here, so it is allowed in a transaction that only reads.
SELECT m.id FROM {message} AS m
WHERE m.id IN :ids AND EXISTS (
  SELECT 1 FROM pg_catalog.pg_locks AS l
  WHERE l.locktype = 'transactionid' AND l.transactionid = m.xmax
    AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid <> pg_catalog.pg_backend_pid())
