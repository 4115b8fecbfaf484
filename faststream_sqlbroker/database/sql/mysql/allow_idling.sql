SET @@SESSION.wait_timeout = CAST(LEAST(@sqlbroker_idle, :limit) AS UNSIGNED)
