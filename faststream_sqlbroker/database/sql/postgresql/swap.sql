-- :queue varchar :version bigint :scopes varchar[] :infos text[] :expiries bigint[] :ids bigint[]
-- :token uuid :lease float
WITH swap AS (
  UPDATE {policy_state} s SET counter = s.counter + 1
  WHERE s.ctid = (
    SELECT v.ctid FROM {policy_state} v
    WHERE v.scope = 'ordered' AND v.key = :queue AND v.counter = :version
    FOR UPDATE SKIP LOCKED)
  RETURNING 1
), kept AS (
  INSERT INTO {policy_state} (scope, key, info, expires_at)
  SELECT u.scope, '', u.info::jsonb, \
    timestamptz 'epoch' + u.expires * interval '1 microsecond'
  FROM unnest(:scopes, :infos, :expiries) AS u(scope, info, expires)
  WHERE EXISTS (SELECT 1 FROM swap)
  ON CONFLICT (scope, key) DO UPDATE \
    SET info = excluded.info, expires_at = excluded.expires_at
), r AS MATERIALIZED (
  SELECT m.ctid AS c FROM {message} m
  WHERE EXISTS (SELECT 1 FROM swap) AND m.id = ANY(:ids) AND CASE WHEN m.queue = :queue
    AND m.state IN ('PENDING', 'RETRYABLE') \
      AND m.next_attempt_at <= statement_timestamp()
    THEN true ELSE false END
  FOR UPDATE SKIP LOCKED
), u AS (
UPDATE {message} m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING {claimed}
)
SELECT * FROM u
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, NULL FROM swap
