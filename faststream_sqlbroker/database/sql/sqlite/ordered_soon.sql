-- :ids in
SELECT (MIN(m.next_attempt_at) - {now}) / 1000000.0 FROM {message} m 
WHERE m.id IN :ids AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') \
  AND m.next_attempt_at > {now}
  THEN 1 ELSE 0 END = 1
