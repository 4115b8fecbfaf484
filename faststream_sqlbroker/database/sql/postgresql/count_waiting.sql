-- Counts, for metrics, what waits in a queue and a priority: what is due and what is not, each up
-- to a limit.
-- In the order of the index: else PostgreSQL may read the table from its begin, in the hope of many
-- messages of the queue, and so messages of other queues without a limit.
-- States are literals: partial indexes serve only conditions that name their own.
-- What stands by is due from 8970 on and counted apart: a newer message of its key is delivered in
-- its place. It is looked at again {standby_seconds} seconds before it is due; last comes for how
-- many seconds the first of it should have been.
SELECT (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at <= statement_timestamp()
  ORDER BY next_attempt_at LIMIT :most_due) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at > statement_timestamp() \
    AND next_attempt_at < '{standby_time}+00'
  ORDER BY next_attempt_at LIMIT :most_later) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at >= '{standby_time}+00' \
    AND (policy_marks & {held_burst}) > 0
  ORDER BY next_attempt_at LIMIT :most_standing) AS found),
  (SELECT extract(epoch FROM statement_timestamp() - next_attempt_at) + {standby_seconds} \
  FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at >= '{standby_time}+00' \
    AND (policy_marks & {held_burst}) > 0
  ORDER BY next_attempt_at LIMIT 1)
