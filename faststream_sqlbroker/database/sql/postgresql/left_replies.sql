-- :queue varchar :everything int
SELECT m.id
FROM {message} m
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue \
  AND (m.expires_at < statement_timestamp() OR :everything = 1)
ORDER BY m.queue, m.priority DESC, m.next_attempt_at, m.id
LIMIT {most_read}
