-- Counts the messages of a queue and priority that are due, and those that are due later, each up
-- to a limit. It is sent for metrics.
-- The states are written out, not bound: a partial index serves only conditions that name its own.
-- The order is that of the index: nothing is sorted, and each walk ends at its limit.
SELECT \
  (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at <= {now}
  ORDER BY next_attempt_at LIMIT :most_due) AS found),
  -- What stands by is left out: a newer message of its key is delivered in its place.
  (SELECT count(*) FROM (SELECT 1 FROM {message} \
  WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
    AND next_attempt_at > {now} AND next_attempt_at < {standby}
  ORDER BY next_attempt_at LIMIT :most_later) AS found)
