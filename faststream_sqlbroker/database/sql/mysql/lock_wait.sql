-- Limits the session's wait for locks, for settlements; `lock_wait_again` changes it back.
-- A row that is locked for longer must not delay the other outcomes of a flush.
-- The session has its own limit from the pool, which is kept in @sqlbroker_wait.
SET @sqlbroker_wait = @@innodb_lock_wait_timeout, \
  SESSION innodb_lock_wait_timeout = :seconds
