-- :since time :ids bigint[]
SELECT CASE WHEN (:number)::text::xid8 >= pg_snapshot_xmax(pg_current_snapshot()) \
  THEN false
  ELSE pg_xact_status((:number)::text::xid8) = 'committed' AND (
    GREATEST(pg_postmaster_start_time(), (SELECT stats_reset \
      FROM pg_stat_bgwriter)) < :since
    OR EXISTS (SELECT FROM {message} m
      WHERE m.id = ANY(:ids) AND m.xmax = (:number)::text::xid8::xid \
        AND m.xmin <> m.xmax))
  END
