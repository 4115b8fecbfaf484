SELECT count(*), coalesce(TIMESTAMPDIFF(MICROSECOND, min(next_attempt_at), UTC_TIMESTAMP(6)) / 1000000 + 220898707200, 0)
FROM (SELECT next_attempt_at FROM message FORCE INDEX (message_ready) WHERE claimable = 1 AND queue = :queue AND priority = :priority AND next_attempt_at >= '8970-01-01 00:00:00' AND (policy_marks & 256) > 0 ORDER BY next_attempt_at LIMIT :most) AS found
