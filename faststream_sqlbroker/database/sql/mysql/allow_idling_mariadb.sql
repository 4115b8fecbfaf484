SET @@SESSION.idle_transaction_timeout = CASE @sqlbroker_idle WHEN 0 THEN :limit \
  ELSE LEAST(@sqlbroker_idle, :limit) END
