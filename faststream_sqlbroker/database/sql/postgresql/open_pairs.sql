-- :queues varchar[]
-- `ready_pairs` without the queues that are paused for the whole fleet.
-- A loose index scan: one step a pair, whatever the number of rows.
-- States are literals: with bound ones a generic plan could not use the partial index.
WITH RECURSIVE p(queue, ord, priority) AS (
  SELECT q.queue, q.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = q.queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  -- The sub-select hides the length of the array from the planner. For 1 000 queues it would
  -- estimate 100 000 pairs, and compile the query (JIT) each time, for half a second.
  FROM unnest((SELECT :queues)) WITH ORDINALITY AS q(queue, ord)
  WHERE NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.key = q.queue \
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp()))
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
  extract(epoch FROM clock_timestamp() - statement_timestamp())::float8, statement_timestamp()
-- Also without a pair, so that the server's time is told.
FROM (SELECT 1) AS at_least_one_row LEFT JOIN f ON true
ORDER BY f.ord, f.priority DESC
