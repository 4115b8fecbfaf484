-- Looks for the pairs of queue and priority that have a message without a lease, before a claim,
-- and where messages are counted. It is a few index searches for each pair, however many messages
-- there are.
WITH RECURSIVE p(place, queue, priority) AS (
  -- The highest priority of each queue.
  SELECT q.key, q.queue, (SELECT m.priority FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = q.queue
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM (SELECT key, value AS queue FROM json_each(:queues)) q
  UNION ALL
  -- Then from each to the next lower one, until there is none: NULL.
  SELECT p.place, p.queue, (SELECT m.priority FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue AND m.priority < p.priority
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
)
-- In how many seconds the first message of the pair is due.
SELECT p.queue, p.priority, \
  ((SELECT m.next_attempt_at FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue AND m.priority = p.priority
    ORDER BY m.next_attempt_at LIMIT 1) - {now}) / 1000000.0,
  -- Whether a message has a due time that is no time: text and bytes, which any column takes, sort
  -- after all numbers. Such a pair counts as due, and the claim repairs it.
  EXISTS (SELECT 1 FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue AND m.priority = p.priority \
      AND m.next_attempt_at > {last_moment})
  OR EXISTS (SELECT 1 FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue AND m.priority = p.priority \
      AND m.next_attempt_at < {first_moment})
FROM p WHERE p.priority IS NOT NULL ORDER BY p.place, p.priority DESC
