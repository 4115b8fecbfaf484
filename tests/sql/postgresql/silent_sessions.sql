SELECT a.pid, a.state_change FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.usename = session_user AND a.pid <> pg_backend_pid()
  AND a.state = 'active' AND a.wait_event = 'ClientRead' AND a.query !~* '\mcopy\M' AND pg_has_role(a.usesysid, 'USAGE') AND EXISTS (
  SELECT FROM pg_proc p WHERE p.proname = 'pg_terminate_backend'
    AND p.pronamespace = 'pg_catalog'::regnamespace AND has_function_privilege(p.oid, 'EXECUTE'))
