-- Sessions whose state is hidden: the role may not see it, or track_activities is off.
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND usesysid IS NOT NULL
  AND ((state IS NULL AND backend_type IS NULL) OR state = 'disabled')
