-- :queues varchar[]
WITH RECURSIVE p(queue, ord, priority) AS (
  SELECT q.queue, q.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = q.queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM unnest((SELECT :queues)) WITH ORDINALITY AS q(queue, ord)
  WHERE NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.key = q.queue \
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp()))
  UNION ALL
  SELECT p.queue, p.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = p.queue AND m.priority < p.priority \
      AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
), f AS MATERIALIZED (
  SELECT p.queue, p.ord, p.priority, (
    SELECT m.next_attempt_at FROM {message} m
    WHERE m.queue = p.queue AND m.priority = p.priority \
      AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.next_attempt_at, m.id LIMIT 1) AS due
  FROM p WHERE p.priority IS NOT NULL
)
SELECT f.queue, f.priority, extract(epoch FROM f.due - statement_timestamp())::float8, \
  f.due,
  extract(epoch FROM clock_timestamp() - statement_timestamp())::float8, \
    statement_timestamp()
FROM (SELECT 1) AS at_least_one_row LEFT JOIN f ON true
ORDER BY f.ord, f.priority DESC
