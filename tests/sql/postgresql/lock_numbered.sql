SELECT m.id, pg_current_xact_id()::text, statement_timestamp(), pg_postmaster_start_time(), set_config('idle_in_transaction_session_timeout',
    CASE WHEN current_setting('idle_in_transaction_session_timeout')::interval
      BETWEEN interval '1 millisecond' AND CAST(:limit AS interval)
    THEN current_setting('idle_in_transaction_session_timeout') ELSE :limit END, true),
  pg_try_advisory_xact_lock_shared(1936813154, rtrim(:limit, 'ms')::int)
FROM unnest(:ids, :tokens) AS u(id, token)
JOIN message m ON m.id = u.id AND m.lease_token = u.token
ORDER BY m.id FOR UPDATE OF m
