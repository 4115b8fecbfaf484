-- Counts the messages of a queue and a priority that stand by, up to `most`, and tells for how many
-- seconds claims should have looked at the first of them, for what operators see. That is
-- {standby_seconds} seconds before it is due. Several are sent as one, by UNION ALL, with numbers
-- behind the names of their binds.
-- In the order of the index: else PostgreSQL may read the table from its begin, in the hope of many
-- messages of the queue, and so messages of other queues without a limit.
-- States are literals: partial indexes serve only conditions that name their own.
SELECT count(*), coalesce( \
  extract(epoch FROM statement_timestamp() - min(next_attempt_at)) + {standby_seconds}, 0)
FROM (SELECT next_attempt_at FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at >= '{standby_time}+00' \
  AND (policy_marks & {held_burst}) > 0 \
ORDER BY next_attempt_at LIMIT :most) AS found
