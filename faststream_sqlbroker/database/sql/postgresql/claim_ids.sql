-- variants: apart
-- :ids bigint[] :queues varchar[] :token uuid :lease float :final int :losses int
WITH r AS MATERIALIZED (
  SELECT m.ctid AS c, m.id, m.attempts_count, m.deliveries_count,  --? apart
      (m.deliveries_count = :final  --? apart
      OR m.deliveries_count < :final \  --? apart
        AND m.deliveries_count - m.attempts_count >= :losses) AS suspect \  --? apart
        FROM {message} m  --? apart
  SELECT m.ctid AS c FROM {message} m  --? !apart
  WHERE m.id = ANY(:ids) AND CASE WHEN m.queue = ANY(:queues)
    AND m.state IN ('PENDING', 'RETRYABLE') \
      AND m.next_attempt_at <= statement_timestamp()
    THEN true ELSE false END
  FOR UPDATE SKIP LOCKED
), u AS (  --? apart
)  --? !apart
UPDATE {message} m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r WHERE NOT r.suspect))  --? apart
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))  --? !apart
RETURNING {claimed}
)  --? apart
SELECT * FROM u  --? apart
UNION ALL  --? apart
SELECT r.id, NULL, NULL, NULL, NULL, NULL, r.attempts_count, r.deliveries_count, NULL, \  --? apart
  NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM r WHERE r.suspect  --? apart
