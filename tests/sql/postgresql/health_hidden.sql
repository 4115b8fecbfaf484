SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND usesysid IS NOT NULL
  AND ((state IS NULL AND backend_type IS NULL) OR state = 'disabled')
