-- Prepares a transaction that takes locks: MySQL ends its session after :limit idle seconds.
-- A machine that vanishes without closing its sockets must not keep rows locked.
-- MySQL has no limit for idle transactions, only one for all idling; `restore` changes it back.
-- The application's own limit is kept in @sqlbroker_idle. The shorter one counts.
SET @sqlbroker_idle = @@SESSION.wait_timeout,
  @@SESSION.wait_timeout = CAST(LEAST(@@SESSION.wait_timeout, :limit) AS UNSIGNED),
  -- Without SESSION, the level is that of this transaction only.
  @@transaction_isolation = 'READ-COMMITTED'
