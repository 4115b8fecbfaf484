-- :ids bigint[]
-- Tells in how many seconds the first of `ids`, heads that wait for their time, is due.
SELECT extract(epoch FROM min(m.next_attempt_at) - statement_timestamp())::float8 \
FROM {message} m 
-- Trap: without fresh statistics the planner would find these rows by the index of ready ones, and
-- read all of it. No index serves a CASE.
WHERE m.id = ANY(:ids) \
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at > statement_timestamp()
  THEN 1 ELSE 0 END = 1
