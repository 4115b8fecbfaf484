SELECT (SELECT count(*) FROM (SELECT 1 FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
  ORDER BY next_attempt_at LIMIT :most_due) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) AND next_attempt_at < 220898707200000000
  ORDER BY next_attempt_at LIMIT :most_later) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at BETWEEN 220898707200000000 AND 253402300799999999 AND (policy_marks & 256) > 0
  ORDER BY next_attempt_at LIMIT :most_standing) AS found),
  (SELECT ((CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) + 220898707200000000 - next_attempt_at) / 1000000.0 FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at BETWEEN 220898707200000000 AND 253402300799999999 AND (policy_marks & 256) > 0
  ORDER BY next_attempt_at LIMIT 1)
