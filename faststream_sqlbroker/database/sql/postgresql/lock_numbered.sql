-- :limit text :ids bigint[] :tokens uuid[]
-- Begins a handler's transaction: locks the rows whose leases are still held, reads the number that
-- proves before the ack that the transaction is the same, with the server that gave it (the start
-- of its process), and sets the idle limit.
SELECT m.id, pg_current_xact_id()::text, statement_timestamp(), pg_postmaster_start_time(), \
  set_config('idle_in_transaction_session_timeout',
    -- The shorter of our limit and the one that the administrator or the application has set, where
    -- 0 means none.
    CASE WHEN current_setting('idle_in_transaction_session_timeout')::interval
      BETWEEN interval '1 millisecond' AND CAST(:limit AS interval)
    THEN current_setting('idle_in_transaction_session_timeout') ELSE :limit END, true),
  -- The lock marks the transaction as the broker's and says how long it may be silent, in
  -- milliseconds: other sessions cannot see a session's limit, but they see its locks. The try
  -- never waits, even if another program uses the key.
  pg_try_advisory_xact_lock_shared({transaction_mark}, rtrim(:limit, 'ms')::int)
FROM unnest(:ids, :tokens) AS u(id, token)
JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
-- In the order of ids, so that two transactions cannot deadlock.
ORDER BY m.id FOR UPDATE OF m
