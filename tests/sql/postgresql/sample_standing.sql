SELECT count(*), coalesce( extract(epoch FROM statement_timestamp() - min(next_attempt_at)) + 220898707200, 0)
FROM (SELECT next_attempt_at FROM message WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority AND next_attempt_at >= '8970-01-01 00:00:00+00' AND (policy_marks & 256) > 0 ORDER BY next_attempt_at LIMIT :most) AS found
