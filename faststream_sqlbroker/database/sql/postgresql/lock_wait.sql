SELECT set_config('lock_timeout', :limit, true)
