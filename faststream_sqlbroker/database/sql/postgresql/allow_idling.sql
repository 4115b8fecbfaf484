-- :limit text
SELECT set_config('idle_in_transaction_session_timeout', :limit, true), \
  pg_try_advisory_xact_lock_shared({mark}, rtrim(:limit, 'ms')::int)
