-- Counts the messages of a queue and priority that are due, and those that are due later, each up
-- to a limit. It is sent for metrics.
-- The states are written out, not bound: a partial index serves only conditions that name its own.
-- The order is that of the index: nothing is sorted, and each walk ends at its limit.
-- What stands by is counted apart: a newer message of its key is delivered in its place. It is
-- looked at again {standby} microseconds before it is due; last comes for how many seconds the
-- first of it should have been. Text and bytes, which any column takes, sort after all numbers.
SELECT \
  (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at <= {now}
  ORDER BY next_attempt_at LIMIT :most_due) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at > {now} AND next_attempt_at < {standby}
  ORDER BY next_attempt_at LIMIT :most_later) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at BETWEEN {standby} AND {last_moment} \
    AND (policy_marks & {held_burst}) > 0
  ORDER BY next_attempt_at LIMIT :most_standing) AS found),
  (SELECT ({now} + {standby} - next_attempt_at) / 1000000.0 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at BETWEEN {standby} AND {last_moment} \
    AND (policy_marks & {held_burst}) > 0
  ORDER BY next_attempt_at LIMIT 1)
