-- :ids bigint[]
SELECT extract(epoch FROM min(m.next_attempt_at) - statement_timestamp())::float8 \
  FROM {message} m 
WHERE m.id = ANY(:ids) AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') \
  AND m.next_attempt_at > statement_timestamp()
  THEN 1 ELSE 0 END = 1
