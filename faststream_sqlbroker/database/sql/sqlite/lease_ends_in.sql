-- Reads in how many seconds the first lease of any process in some queues ends; NULL without a
-- lease.
-- It is one descent of the index for each queue.
SELECT (MIN((SELECT m.lease_expires_at FROM {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL
  ORDER BY m.queue, m.lease_expires_at LIMIT 1)) - {now}) / 1000000.0
FROM json_each(:queues) q
