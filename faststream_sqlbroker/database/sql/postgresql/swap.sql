-- :queue varchar :version bigint :scopes varchar[] :infos text[] :expiries bigint[] :ids bigint[]
-- :token uuid :lease float
-- The second half of a claim under policies (`look` is the first): raises the version of the queue,
-- stores states and leases, but only if the version is still the one that was read. So a claim that
-- has decided by what is no longer true writes nothing. No row comes back then; else one of NULLs
-- does, with those that were leased.
WITH swap AS (
  UPDATE {policy_state} s SET counter = s.counter + 1
  -- The subquery locks the version before the update looks at it: one that was raised since the
  -- snapshot is compared again as it is now, and one that is just being raised counts as raised.
  WHERE s.ctid = (
    SELECT v.ctid FROM {policy_state} v
    WHERE v.scope = 'ordered' AND v.key = :queue AND v.counter = :version
    FOR UPDATE SKIP LOCKED)
  RETURNING 1
), kept AS (
  INSERT INTO {policy_state} (scope, key, info, expires_at)
  SELECT u.scope, '', u.info::jsonb, timestamptz 'epoch' + u.expires * interval '1 microsecond'
  FROM unnest(:scopes, :infos, :expiries) AS u(scope, info, expires)
  WHERE EXISTS (SELECT 1 FROM swap)
  ON CONFLICT (scope, key) DO UPDATE \
  SET info = excluded.info, expires_at = excluded.expires_at
), r AS MATERIALIZED (
  -- Messages are locked only after the version, by their ids.
  -- Trap: without fresh statistics the planner takes the index of ready rows, and finds one row of
  -- a deep queue by reading all of them. No index serves a CASE.
  SELECT m.ctid AS c FROM {message} m
  WHERE EXISTS (SELECT 1 FROM swap) AND m.id = ANY(:ids) AND CASE WHEN m.queue = :queue
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    THEN true ELSE false END
  FOR UPDATE SKIP LOCKED
), u AS (
-- By ctid: joined on id, the planner chose a sequential scan at 20 000 rows.
UPDATE {message} m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING {claimed}
)
SELECT * FROM u
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL \
FROM swap
