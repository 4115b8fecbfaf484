SELECT (MIN(m.next_attempt_at) - (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)) / 1000000.0 FROM message m 
WHERE m.id IN (__[POSTCOMPILE_ids]) AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
  THEN 1 ELSE 0 END = 1
