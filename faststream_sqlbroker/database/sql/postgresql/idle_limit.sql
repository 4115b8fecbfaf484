-- variants: anew
-- :limit text
-- Begins a transaction of the broker that locks rows: the server ends the session if it is idle for
-- longer than the limit. All settings are the transaction's own, so nothing is left of them.
SELECT set_config('idle_in_transaction_session_timeout',
    -- The shorter of our limit and the one that the administrator or the application has set, where
    -- 0 means none.
    CASE WHEN current_setting('idle_in_transaction_session_timeout')::interval
      BETWEEN interval '1 millisecond' AND CAST(:limit AS interval)
    THEN current_setting('idle_in_transaction_session_timeout') ELSE :limit END, true),
  -- The lock marks the transaction as the broker's and says how long it may be silent, in
  -- milliseconds: other sessions cannot see a session's limit, but they see its locks. The try
  -- never waits, even if another program uses the key.
  pg_try_advisory_xact_lock_shared({transaction_mark}, rtrim(:limit, 'ms')::int)  --? !anew
  pg_try_advisory_xact_lock_shared({transaction_mark}, rtrim(:limit, 'ms')::int),  --? anew
  -- A connection may keep a plan from a time when the table was empty. It reads the whole table.
  -- Planning anew costs less than that, and is done only for single messages, which are rare.
  set_config('plan_cache_mode', 'force_custom_plan', true)  --? anew
