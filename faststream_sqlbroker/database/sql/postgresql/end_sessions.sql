-- :pids bigint[] :since time[] :waited bigint[] :tables text[]
-- Ends those of the sessions that still wait, have locked rows of the broker's tables, and have
-- waited longer than the mark of their transaction says that they may.
SELECT a.pid, pg_terminate_backend(a.pid)
FROM unnest(:pids, :since, :waited) AS s(pid, since, waited)
JOIN pg_stat_activity a ON a.pid = s.pid AND a.state_change = s.since
WHERE a.datname = current_database() AND a.usename = session_user AND a.pid <> pg_backend_pid()
  AND a.state = 'active' AND a.wait_event = 'ClientRead' AND s.waited >= (
  SELECT max(l.objid::bigint) FROM pg_locks l
  WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.classid = {transaction_mark} AND l.objsubid = 2
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
) AND EXISTS (
  SELECT FROM pg_locks l JOIN unnest(:tables) AS t(name) ON l.relation = to_regclass(t.name)
  WHERE l.pid = a.pid AND l.locktype = 'relation' AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.mode IN ('RowShareLock', 'RowExclusiveLock'))
