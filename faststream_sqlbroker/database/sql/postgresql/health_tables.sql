-- Rows, dead rows and the last vacuum of each table.
SELECT w.name AS name, coalesce(s.n_live_tup, 0) AS live, coalesce(s.n_dead_tup, 0) AS dead,
  coalesce(s.n_ins_since_vacuum, 0) AS inserted,
  extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8 AS ago,
  c.reloptions AS options
FROM unnest(CAST(:names AS text[])) AS w(name)
JOIN pg_class c ON c.oid = to_regclass(w.name)
LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
