SET @sqlbroker_idle = @@SESSION.idle_transaction_timeout,
  @@SESSION.idle_transaction_timeout = CASE @@SESSION.idle_transaction_timeout WHEN 0 \
    THEN :limit ELSE LEAST(@@SESSION.idle_transaction_timeout, :limit) END,
  @@tx_isolation = 'READ-COMMITTED'
