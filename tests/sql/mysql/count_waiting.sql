SELECT (SELECT count(*) FROM (SELECT 1 FROM message FORCE INDEX (message_ready) WHERE claimable = 1 AND queue = :queue AND priority = :priority AND next_attempt_at <= UTC_TIMESTAMP(6)
  ORDER BY next_attempt_at LIMIT :most_due) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM message FORCE INDEX (message_ready) WHERE claimable = 1 AND queue = :queue AND priority = :priority AND next_attempt_at > UTC_TIMESTAMP(6) AND next_attempt_at < '8970-01-01 00:00:00'
  ORDER BY next_attempt_at LIMIT :most_later) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM message FORCE INDEX (message_ready) WHERE claimable = 1 AND queue = :queue AND priority = :priority AND next_attempt_at >= '8970-01-01 00:00:00' AND (policy_marks & 256) > 0
  ORDER BY next_attempt_at LIMIT :most_standing) AS found),
  (SELECT TIMESTAMPDIFF(MICROSECOND, next_attempt_at, UTC_TIMESTAMP(6)) / 1000000 + 220898707200 FROM message FORCE INDEX (message_ready) WHERE claimable = 1 AND queue = :queue AND priority = :priority AND next_attempt_at >= '8970-01-01 00:00:00' AND (policy_marks & 256) > 0
  ORDER BY next_attempt_at LIMIT 1)
