-- :started time :since time :ids bigint[] :tokens uuid[]
-- Tells whether the ended transaction of that number, which had locked rows for a handler, was
-- committed. It is sent in another transaction; false if the server does not know.
-- Trap: a number belongs to one server until that server crashes. A crash forgets a transaction of
-- which nothing was written, and a standby knows only what it has replayed: after a crash or a
-- promotion the number may be given to another transaction. So the number is believed in two cases
-- only. First, the server is the one that gave it, by the start of its process (a standby keeps its
-- own start when it is promoted), and has not crashed since the lock: a crash resets its
-- statistics. Second, the row still has the lock (xmax) under the same lease: then the number was
-- written, and is not given out again, not even by a standby that has replayed it.
SELECT CASE WHEN (:number)::text::xid8 >= pg_snapshot_xmax(pg_current_snapshot()) THEN false
  ELSE pg_xact_status((:number)::text::xid8) = 'committed' AND (
    (pg_postmaster_start_time() = :started AND (SELECT stats_reset FROM pg_stat_bgwriter) < :since)
    -- A handler's transaction only locks the row. One that locks it and then writes it, such as a
    -- renewal, leaves its lock in the new version. There xmin = xmax, so it is not taken for ours.
    OR EXISTS (SELECT FROM {message} m
      JOIN unnest(:ids, :tokens) AS u(id, token) ON m.id = u.id AND m.lease_token = u.token
      WHERE m.xmax = (:number)::text::xid8::xid AND m.xmin <> m.xmax))
  END
