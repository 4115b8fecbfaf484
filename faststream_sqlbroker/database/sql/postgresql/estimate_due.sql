-- Asks the planner how many messages `sample_due` would find. It is sent where there are more than
-- are counted.
-- States are literals: partial indexes serve only conditions that name their own.
EXPLAIN SELECT 1 FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= statement_timestamp()
