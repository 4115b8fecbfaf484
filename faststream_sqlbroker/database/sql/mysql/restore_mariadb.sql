-- Gives the session the application's idle limit back, after the end of a limited transaction.
SET @@SESSION.idle_transaction_timeout = @sqlbroker_idle
