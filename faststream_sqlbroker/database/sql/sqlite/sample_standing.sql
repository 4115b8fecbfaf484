-- Counts the messages of a queue and a priority that stand by, up to `:most`, and tells for how many
-- seconds claims should have looked at the first of them, for what operators see. That is
-- {standby} microseconds before it is due. Text and bytes, which any column takes,
-- sort after all numbers.
-- `sample_all` joins several of these by UNION ALL. It removes the first word, and gives `:queue`
-- and `:priority` a number.
SELECT count(*), coalesce(({now} + {standby} - min(next_attempt_at)) / 1000000.0, 0)
-- The states are written out, not bound: a partial index serves only conditions that name its own.
-- The order is that of the index: nothing is sorted, and the walk ends at the limit.
FROM (SELECT next_attempt_at FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue = :queue AND priority = :priority \
  AND next_attempt_at BETWEEN {standby} AND {last_moment} \
  AND (policy_marks & {held_burst}) > 0 \
ORDER BY next_attempt_at LIMIT :most) AS found
