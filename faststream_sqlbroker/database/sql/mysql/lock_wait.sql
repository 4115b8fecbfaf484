SET @sqlbroker_wait = @@innodb_lock_wait_timeout, \
  SESSION innodb_lock_wait_timeout = :seconds
