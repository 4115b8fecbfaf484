-- variants: by_header, others, others by_header
-- :ids bigint[] :mask smallint :final int :losses int
SELECT m.id, m.{key_column} FROM {message} m 
WHERE m.id = ANY(:ids) AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') \
  AND m.next_attempt_at <= statement_timestamp()
  AND (m.policy_marks & :mask) >= :mask  --? others
    AND NOT (m.deliveries_count = :final  --? others
      OR m.deliveries_count < :final \  --? others
        AND m.deliveries_count - m.attempts_count >= :losses) THEN 1 ELSE 0 END = 1  --? others
  AND (m.policy_marks & :mask) >= :mask THEN 1 ELSE 0 END = 1  --? !others
ORDER BY m.priority DESC, m.next_attempt_at, m.id
