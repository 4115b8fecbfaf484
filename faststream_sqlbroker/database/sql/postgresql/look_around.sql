-- variants: alive
-- :queues varchar[] :leased varchar[] :lease float :kept float :names varchar[] :infos text[]
-- :changed varchar[]
-- The scan for ready pairs of queue and priority (`ready_pairs`), with all else that a process
-- looks at: when the first lease in `leased` ends. alive is also a sign of life of the process's
-- subscribers, and reads what operators have asked: paused queues, cancels and drained subscribers.
-- States are literals: with bound ones a generic plan could not use the partial indexes.
WITH RECURSIVE \
sign AS (  --? alive
  -- This modifies data, so it runs although nothing reads it.
  INSERT INTO {policy_state} AS s \  --? alive
    (scope, key, info, created_at, lease_expires_at, expires_at)  --? alive
  SELECT 'subscriber', m.name, m.info::jsonb, statement_timestamp(),  --? alive
    statement_timestamp() + :lease * interval '1 second',  --? alive
    statement_timestamp() + :kept * interval '1 second'  --? alive
  FROM unnest(:names, :infos) AS m(name, info)  --? alive
  ORDER BY m.name  --? alive
  ON CONFLICT (scope, key) DO UPDATE  --? alive
  SET lease_expires_at = excluded.lease_expires_at, expires_at = excluded.expires_at,  --? alive
    info = CASE WHEN s.key = ANY(:changed) THEN excluded.info ELSE s.info END  --? alive
), \  --? alive
p(queue, ord, priority) AS (
  SELECT q.queue, q.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = q.queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  -- The sub-select hides the length of the array from the planner. For 1 000 queues it would
  -- estimate 100 000 pairs, and compile the query (JIT) each time, for half a second.
  FROM unnest((SELECT :queues)) WITH ORDINALITY AS q(queue, ord)
  UNION ALL
  SELECT p.queue, p.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = p.queue AND m.priority < p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
), f AS MATERIALIZED (
  SELECT p.queue, p.ord, p.priority, (
    SELECT m.next_attempt_at FROM {message} m
    WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.next_attempt_at, m.id LIMIT 1) AS due
  FROM p WHERE p.priority IS NOT NULL
)
SELECT f.queue, f.priority, extract(epoch FROM f.due - statement_timestamp())::float8, f.due,
  extract(epoch FROM clock_timestamp() - statement_timestamp())::float8, statement_timestamp(),
  -- These sub-selects depend on no row, so each is computed once.
  (SELECT extract(epoch FROM min(x.ends) - statement_timestamp())::float8
    FROM unnest((SELECT :leased)) AS q(queue)
    CROSS JOIN LATERAL (
      SELECT m.lease_expires_at AS ends FROM {message} m
      WHERE m.queue = q.queue AND m.state = 'PROCESSING'
      ORDER BY m.lease_expires_at LIMIT 1) \
      x)  --? !alive
      x),  --? alive
  (SELECT coalesce(array_agg(s.key), ARRAY[]::varchar[]) FROM {policy_state} s  --? alive
    WHERE s.scope = 'paused' \  --? alive
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp())),  --? alive
  (SELECT coalesce(json_agg(json_build_array(s.key, s.info)), '[]')::text  --? alive
    FROM {policy_state} s WHERE s.scope = 'cancel'),  --? alive
  (SELECT coalesce(array_agg(s.key), ARRAY[]::varchar[]) FROM {policy_state} s  --? alive
    WHERE s.scope = 'subscriber' AND s.key = ANY(:names) AND s.counter > 0)  --? alive
-- Also without a pair, so that the rest is told.
FROM (SELECT 1) AS at_least_one_row LEFT JOIN f ON true
ORDER BY f.ord, f.priority DESC
