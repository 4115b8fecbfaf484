-- Counts the due messages of a queue and a priority, up to `most`, those of them that had an
-- attempt, and suspects, for what operators see. Several are sent as one, by UNION ALL, with numbers
-- behind the names of their binds.
-- In the order of the index: else PostgreSQL may read the table from its begin, in the hope of many
-- messages of the queue, and so messages of other queues without a limit.
-- States are literals: partial indexes serve only conditions that name their own.
SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count >= {suspect_after} THEN 1 END)
FROM (SELECT state, attempts_count, deliveries_count FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= statement_timestamp() \
ORDER BY next_attempt_at LIMIT :most) AS found
