SELECT m.id, m.policy_key FROM message m 
WHERE m.id = ANY(:ids) AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  AND (m.policy_marks & :mask) >= :mask
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final THEN 1 ELSE 0 END = 1
ORDER BY m.priority DESC, m.next_attempt_at, m.id
