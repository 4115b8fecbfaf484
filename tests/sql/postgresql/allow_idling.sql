SELECT set_config('idle_in_transaction_session_timeout', :limit, true), pg_try_advisory_xact_lock_shared(1936813154, rtrim(:limit, 'ms')::int)
