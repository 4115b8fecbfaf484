SET @@SESSION.wait_timeout = @sqlbroker_idle
