SELECT (MIN((SELECT m.lease_expires_at FROM message m INDEXED BY message_leased
  WHERE m.queue = q.value AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL
  ORDER BY m.queue, m.lease_expires_at LIMIT 1)) - (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)) / 1000000.0
FROM json_each(:queues) q
