-- Looks as `ready_pairs` does, but leaves out queues that are paused for the whole fleet. It is
-- sent by direct claims and for pull consumers.
WITH RECURSIVE p(place, queue, priority) AS (
  -- The highest priority of each queue.
  SELECT q.key, q.queue, (SELECT m.priority FROM {message} m INDEXED BY {ready_index}
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = q.queue
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM (SELECT key, value AS queue FROM json_each(:queues)) q
  WHERE NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s."key" = q.queue \
      AND (s.expires_at IS NULL OR s.expires_at > {now}))
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
