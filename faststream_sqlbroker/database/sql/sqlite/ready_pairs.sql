WITH RECURSIVE p(place, queue, priority) AS (
  SELECT q.key, q.queue, (SELECT m.priority FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = q.queue
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM (SELECT key, value AS queue FROM json_each(:queues)) q
  UNION ALL
  SELECT p.place, p.queue, (SELECT m.priority FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue \
      AND m.priority < p.priority
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
)
SELECT p.queue, p.priority, \
  ((SELECT m.next_attempt_at FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue \
      AND m.priority = p.priority
    ORDER BY m.next_attempt_at LIMIT 1) - {now}) / 1000000.0,
  EXISTS (SELECT 1 FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue \
      AND m.priority = p.priority AND m.next_attempt_at > {last_moment})
  OR EXISTS (SELECT 1 FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue \
      AND m.priority = p.priority AND m.next_attempt_at < {first_moment})
FROM p WHERE p.priority IS NOT NULL ORDER BY p.place, p.priority DESC
