SELECT (SELECT count(*) FROM (SELECT 1 FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at <= statement_timestamp()
  ORDER BY next_attempt_at LIMIT :most_due) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at > statement_timestamp() AND next_attempt_at < '8970-01-01 00:00:00+00'
  ORDER BY next_attempt_at LIMIT :most_later) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at >= '8970-01-01 00:00:00+00' AND (policy_marks & 256) > 0
  ORDER BY next_attempt_at LIMIT :most_standing) AS found),
  (SELECT extract(epoch FROM statement_timestamp() - next_attempt_at) + 220898707200 FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at >= '8970-01-01 00:00:00+00' AND (policy_marks & 256) > 0
  ORDER BY next_attempt_at LIMIT 1)
