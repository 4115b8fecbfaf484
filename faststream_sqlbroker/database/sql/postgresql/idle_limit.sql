-- variants: anew
-- :limit text
SELECT set_config('idle_in_transaction_session_timeout',
    CASE WHEN current_setting('idle_in_transaction_session_timeout')::interval
      BETWEEN interval '1 millisecond' AND CAST(:limit AS interval)
    THEN current_setting('idle_in_transaction_session_timeout') ELSE :limit END, true),
  pg_try_advisory_xact_lock_shared({mark}, rtrim(:limit, 'ms')::int),  --? anew
  set_config('plan_cache_mode', 'force_custom_plan', true)  --? anew
  pg_try_advisory_xact_lock_shared({mark}, rtrim(:limit, 'ms')::int)  --? !anew
