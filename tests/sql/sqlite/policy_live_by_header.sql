SELECT m.id, m.state, m.next_attempt_at, m.acquired_at,
  CAST(m.policy_key AS BLOB), m.policy_marks, m.deliveries_count - m.attempts_count,
  CASE WHEN m.expires_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) THEN 1 ELSE 0 END
FROM (SELECT json_extract(value, '$.id') AS id FROM json_each(:rows)) u CROSS JOIN message m  ON m.id = u.id WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
