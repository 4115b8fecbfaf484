SELECT 'replication slot' AS kind, slot_name AS name, NULL AS user, NULL AS application,
  CASE WHEN active THEN 'active' ELSE 'inactive' END AS state, NULL::float8 AS age, NULL AS query
FROM pg_replication_slots WHERE xmin IS NOT NULL AND NOT active LIMIT 20
