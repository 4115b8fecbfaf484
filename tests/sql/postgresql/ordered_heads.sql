SELECT m.id, m.key FROM message m 
WHERE m.id = ANY(:ids) AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  AND (m.policy_marks & :mask) >= :mask
ORDER BY m.priority DESC, m.next_attempt_at, m.id
