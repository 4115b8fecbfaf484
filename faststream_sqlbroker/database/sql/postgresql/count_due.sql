-- Counts the due messages of a queue and a priority, up to `most`, for the depth of a queue.
-- In the order of the index: else PostgreSQL may read the table from its begin.
-- States are literals: partial indexes serve only conditions that name their own.
SELECT count(*) FROM (SELECT 1 FROM {message}
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= statement_timestamp() \
ORDER BY next_attempt_at LIMIT :most) AS found
