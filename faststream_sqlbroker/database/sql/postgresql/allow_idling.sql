-- :limit text
-- Sets the idle limit of a handler's transaction anew. It is sent when the handler asks for more
-- time in which it sends nothing. What the administrator had set is no longer known.
-- The advisory lock marks the transaction as the broker's and says how long it may be silent, in
-- milliseconds: other sessions cannot see a session's limit, but they see its locks. The try never
-- waits, even if another program uses the key.
SELECT set_config('idle_in_transaction_session_timeout', :limit, true), \
  pg_try_advisory_xact_lock_shared({transaction_mark}, rtrim(:limit, 'ms')::int)
