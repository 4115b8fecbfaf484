SET @@SESSION.idle_transaction_timeout = @sqlbroker_idle
