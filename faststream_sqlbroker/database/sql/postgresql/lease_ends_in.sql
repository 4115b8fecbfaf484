-- :queues varchar[]
SELECT extract(epoch FROM min(x.ends) - statement_timestamp())::float8
FROM unnest(:queues) AS q(queue)
CROSS JOIN LATERAL (
  SELECT m.lease_expires_at AS ends FROM {message} m
  WHERE m.queue = q.queue AND m.state = 'PROCESSING'
  ORDER BY m.lease_expires_at LIMIT 1) x
