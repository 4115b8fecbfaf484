-- variants: apart
-- :ids bigint[] :queues varchar[] :token uuid :lease float :final int :losses int
-- Leases those messages of `ids` that are due in one of `queues` and not locked.
-- apart locks suspects, the messages that may have killed their process, but does not lease them:
-- it returns their ids and counts, and NULL for all else.
WITH r AS MATERIALIZED (
  SELECT m.ctid AS c \  --? !apart
  SELECT m.ctid AS c, m.id, m.attempts_count, m.deliveries_count,  --? apart
      (m.deliveries_count - m.attempts_count BETWEEN :losses AND :final) AS suspect \  --? apart
  FROM {message} m
  -- Trap: without fresh statistics the planner takes the index of ready rows, and finds one row of
  -- a deep queue by reading all of them. No index serves a CASE.
  WHERE m.id = ANY(:ids) AND CASE WHEN m.queue = ANY(:queues)
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    THEN true ELSE false END
  FOR UPDATE SKIP LOCKED
), u AS (  --? apart
)  --? !apart
-- By ctid: joined on id, the planner chose a sequential scan at 20 000 rows.
UPDATE {message} m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))  --? !apart
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r WHERE NOT r.suspect))  --? apart
RETURNING {claimed}
)  --? apart
SELECT * FROM u  --? apart
UNION ALL  --? apart
SELECT r.id, NULL, NULL, NULL, NULL, NULL, r.attempts_count, r.deliveries_count, \  --? apart
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL \  --? apart
FROM r WHERE r.suspect  --? apart
