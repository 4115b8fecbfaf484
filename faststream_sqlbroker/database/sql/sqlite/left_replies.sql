-- :queue varchar :everything int
SELECT m.id
FROM {message} m INDEXED BY {ready_index}
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue \
  AND (m.expires_at < {now} OR :everything = 1)
LIMIT {most_read}
