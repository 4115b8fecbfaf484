WITH RECURSIVE p(queue, ord, priority) AS (
  SELECT q.queue, q.ord, (
    SELECT m.priority FROM message m
    WHERE m.queue = q.queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM unnest(:queues) WITH ORDINALITY AS q(queue, ord)
  UNION ALL
  SELECT p.queue, p.ord, (
    SELECT m.priority FROM message m
    WHERE m.queue = p.queue AND m.priority < p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
)
SELECT p.queue, p.priority, (
  SELECT extract(epoch FROM m.next_attempt_at - statement_timestamp())::float8 FROM message m
  WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
  ORDER BY m.next_attempt_at, m.id LIMIT 1) AS due_in
FROM p WHERE p.priority IS NOT NULL ORDER BY p.ord, p.priority DESC
