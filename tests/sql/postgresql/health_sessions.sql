SELECT CASE backend_type WHEN 'walsender' THEN 'standby' ELSE 'session' END AS kind,
  pid::text AS name, usename AS user, application_name AS application,
  coalesce(state, backend_type) AS state,
  extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age,
  left(query, 200) AS query
FROM pg_stat_activity
WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL
    OR state LIKE 'idle in transaction%')
  AND (datname = current_database() OR datname IS NULL)
  AND coalesce(backend_type, '') <> 'autovacuum worker'
ORDER BY xact_start NULLS FIRST LIMIT 20
