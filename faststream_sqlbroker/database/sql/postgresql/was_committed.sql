-- :since time :ids bigint[]
-- Tells whether the ended transaction of that number, which had locked `ids` for a handler, was
-- committed. It is sent in another transaction; false if the server does not know.
-- Trap: a crash of the server forgets a transaction of which nothing was written, and gives its
-- number to another one. So the number is believed in two cases only. First, the server has not
-- crashed since the lock: a crash resets its statistics. Second, the row still has the lock (xmax):
-- then the number was written, and is not given out again.
SELECT CASE WHEN (:number)::text::xid8 >= pg_snapshot_xmax(pg_current_snapshot()) THEN false
  ELSE pg_xact_status((:number)::text::xid8) = 'committed' AND (
    GREATEST(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) < :since
    -- A handler's transaction only locks the row. One that locks it and then writes it, such as a
    -- renewal, leaves its lock in the new version. There xmin = xmax, so it is not taken for ours.
    OR EXISTS (SELECT FROM {message} m
      WHERE m.id = ANY(:ids) AND m.xmax = (:number)::text::xid8::xid AND m.xmin <> m.xmax))
  END
