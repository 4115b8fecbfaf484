SET @sqlbroker_idle = @@SESSION.wait_timeout,
  @@SESSION.wait_timeout = CAST(LEAST(@@SESSION.wait_timeout, :limit) AS UNSIGNED),
  @@transaction_isolation = 'READ-COMMITTED'
