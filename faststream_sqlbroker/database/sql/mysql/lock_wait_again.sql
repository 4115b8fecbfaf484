-- Gives the session its own limit of waits for locks back, which `lock_wait` has kept.
SET SESSION innodb_lock_wait_timeout = @sqlbroker_wait
