-- :queue varchar :everything int
-- Finds the expired replies of a queue, to be removed. With `:everything` it finds all of them: the
-- queue's process has ended, or has made no request since.
SELECT m.id
FROM {message} m INDEXED BY {ready_index}
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue \
  AND (m.expires_at < {now} OR :everything = 1)
LIMIT {max_replies}
