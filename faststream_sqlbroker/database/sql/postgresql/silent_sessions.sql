-- Sessions that wait for their client in the middle of a statement. Not those of COPY, which reads
-- from its client all the time. A user without the right to call pg_terminate_backend gets no rows:
-- `end_sessions`, which calls it, would be refused even for no rows.
SELECT a.pid, a.state_change FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.usename = session_user AND a.pid <> pg_backend_pid()
  AND a.state = 'active' AND a.wait_event = 'ClientRead' \
  AND a.query !~* '\mcopy\M' AND pg_has_role(a.usesysid, 'USAGE') AND EXISTS (
  SELECT FROM pg_proc p WHERE p.proname = 'pg_terminate_backend'
    AND p.pronamespace = 'pg_catalog'::regnamespace AND has_function_privilege(p.oid, 'EXECUTE'))
