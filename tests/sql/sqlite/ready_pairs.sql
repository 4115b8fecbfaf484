WITH RECURSIVE p(place, queue, priority) AS (
  SELECT q.key, q.queue, (SELECT m.priority FROM message m INDEXED BY message_ready
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = q.queue
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM (SELECT key, value AS queue FROM json_each(:queues)) q
  UNION ALL
  SELECT p.place, p.queue, (SELECT m.priority FROM message m INDEXED BY message_ready
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue AND m.priority < p.priority
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
)
SELECT p.queue, p.priority, ((SELECT m.next_attempt_at FROM message m INDEXED BY message_ready
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue AND m.priority = p.priority
    ORDER BY m.next_attempt_at LIMIT 1) - (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)) / 1000000.0,
  EXISTS (SELECT 1 FROM message m INDEXED BY message_ready
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue AND m.priority = p.priority AND m.next_attempt_at > 253402300799999999)
  OR EXISTS (SELECT 1 FROM message m INDEXED BY message_ready
    WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = p.queue AND m.priority = p.priority AND m.next_attempt_at < -62135596800000000)
FROM p WHERE p.priority IS NOT NULL ORDER BY p.place, p.priority DESC
