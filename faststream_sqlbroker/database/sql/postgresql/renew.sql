-- :ids bigint[] :tokens uuid[] :lease float
-- Lengthens leases that are still held, and skips rows that another transaction has locked.
WITH r AS MATERIALIZED (
  SELECT m.ctid AS c
  FROM unnest(:ids, :tokens) AS u(id, token) \
  JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
  ORDER BY m.id FOR UPDATE OF m SKIP LOCKED
)
UPDATE {message} m
-- A lease is never shortened: if two renewals run at once, the longer one may be executed first.
SET lease_expires_at = GREATEST(m.lease_expires_at, \
  statement_timestamp() + :lease * interval '1 second')
-- By ctid: joined on id, the planner chose a sequential scan at 20 000 rows. If the update waited
-- for a row that changes, it would look for the old ctid and miss the row. So where locked rows are
-- to be waited for, `lock` is sent first.
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING m.id
