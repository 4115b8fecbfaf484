SELECT CASE WHEN (:number)::text::xid8 >= pg_snapshot_xmax(pg_current_snapshot()) THEN false
  ELSE pg_xact_status((:number)::text::xid8) = 'committed' AND (
    (pg_postmaster_start_time() = :started AND (SELECT stats_reset FROM pg_stat_bgwriter) < :since)
    OR EXISTS (SELECT FROM message m
      JOIN unnest(:ids, :tokens) AS u(id, token) ON m.id = u.id AND m.lease_token = u.token
      WHERE m.xmax = (:number)::text::xid8::xid AND m.xmin <> m.xmax))
  END
