-- Asks the planner how many messages `sample_later` would find. It is sent where there are more
-- than are counted.
-- States are literals: partial indexes serve only conditions that name their own.
-- What stands by, which is due from 8970 on, does not count: a newer message of its key is
-- delivered in its place.
EXPLAIN SELECT 1 FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at > statement_timestamp() AND next_attempt_at < '{standby_time}+00'
