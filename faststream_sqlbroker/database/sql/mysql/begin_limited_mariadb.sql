-- Prepares a transaction that takes locks: MariaDB ends its session after :limit idle seconds.
-- It is for MariaDB from 11.1 on; `begin_limited_mariadb_10` is for older ones.
-- A machine that vanishes without closing its sockets must not keep rows locked.
-- The application's own limit is kept in @sqlbroker_idle; `restore_mariadb` changes it back.
-- The shorter one counts. 0 means no limit.
SET @sqlbroker_idle = @@SESSION.idle_transaction_timeout,
  @@SESSION.idle_transaction_timeout = \
    CASE @@SESSION.idle_transaction_timeout WHEN 0 THEN :limit \
      ELSE LEAST(@@SESSION.idle_transaction_timeout, :limit) END,
  -- Without SESSION, the level is that of this transaction only.
  @@transaction_isolation = 'READ-COMMITTED'
