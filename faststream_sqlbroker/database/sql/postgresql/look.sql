-- variants: others
-- :queues varchar[] :most int :scopes varchar[] :size int :final int :losses int
-- Reads, of one moment, what a claim under policies decides by: the first due messages of each
-- priority, the leases, the states and the version of each queue. It locks nothing; `swap` writes.
-- others skips suspects, the messages that may have killed their process.
-- States are literals: with bound ones a generic plan could not use the partial indexes.
WITH RECURSIVE p(queue, ord, priority, is_first) AS (
  SELECT q.queue, q.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = q.queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1), true
  -- The sub-select hides the length of the array from the planner. For 1 000 queues it would
  -- estimate 100 000 pairs, and compile the query (JIT) each time, for half a second.
  FROM unnest((SELECT :queues)) WITH ORDINALITY AS q(queue, ord)
  UNION ALL
  SELECT p.queue, p.ord, (
    SELECT m.priority FROM {message} m
    WHERE m.queue = p.queue AND m.priority < p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1), false
  FROM p WHERE p.priority IS NOT NULL
), f AS MATERIALIZED (
  SELECT p.*, (
    SELECT m.next_attempt_at FROM {message} m
    WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.next_attempt_at, m.id LIMIT 1) AS due
  FROM p WHERE p.priority IS NOT NULL
)
SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint, f.queue,
  extract(epoch FROM f.due - statement_timestamp())::float8,
  -- What is of the queue, and not of a priority, is asked for once, with its first priority.
  CASE WHEN f.is_first THEN (
    SELECT s.counter FROM {policy_state} s
    WHERE s.scope = 'ordered' AND s.key = f.queue) END,
  CASE WHEN f.is_first THEN (
    SELECT count(*) FROM (
      SELECT 1 FROM {message} m
      WHERE m.queue = f.queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL
      LIMIT :most) r) END,
  CASE WHEN f.is_first THEN (
    SELECT json_object_agg(s.scope, s.info)::text
    FROM unnest(:scopes) AS x(scope)
    JOIN {policy_state} s ON s.scope = x.scope || f.queue AND s.key = '') END,
  c.ids, c.marks, c.expired, c.keyless, c.lost
-- Also without a message, so that the database's time is told.
FROM (SELECT 1) AS at_least_one_row LEFT JOIN f ON true LEFT JOIN LATERAL (
  SELECT array_agg(d.id ORDER BY d.due, d.id) AS ids,
    array_agg(d.marks ORDER BY d.due, d.id) AS marks,
    array_agg(d.expired ORDER BY d.due, d.id) AS expired,
    array_agg(d.keyless ORDER BY d.due, d.id) AS keyless,
    array_agg(d.lost ORDER BY d.due, d.id) AS lost
  FROM (
    SELECT m.id, m.next_attempt_at AS due, m.policy_marks AS marks,
      coalesce(m.expires_at <= statement_timestamp(), false) AS expired,
      m.key IS NULL AS keyless, m.deliveries_count - m.attempts_count AS lost
    FROM {message} m
    WHERE m.queue = f.queue AND m.priority = f.priority AND m.state IN ('PENDING', 'RETRYABLE')
      AND m.next_attempt_at <= statement_timestamp()
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
    ORDER BY m.next_attempt_at, m.id LIMIT :size) d
) c ON f.due <= statement_timestamp()
ORDER BY f.ord, f.priority DESC
