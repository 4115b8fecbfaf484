-- :queue varchar :everything int
-- Finds replies that are to be removed: those that have expired, or, with `everything`, all.
-- In the order of the index of ready rows: only this makes PostgreSQL use it.
-- States are literals: with bound ones a generic plan could not use the partial index.
SELECT m.id
FROM {message} m
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.queue = :queue \
  AND (m.expires_at < statement_timestamp() OR :everything = 1)
ORDER BY m.queue, m.priority DESC, m.next_attempt_at, m.id
LIMIT {max_replies}
