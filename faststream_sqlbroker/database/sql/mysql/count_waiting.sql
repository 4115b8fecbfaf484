-- Counts what is due of a queue and a priority, and what is due later, each up to its limit.
-- Metrics send it. What is due and what is not are two ranges of an index, in its order; each is
-- left as soon as its limit is reached. `claimable`, which leads the index, is 1 or NULL.
-- What stands by is due from 8970 on and counted apart: a newer message of its key is delivered in
-- its place. It is looked at again {standby_seconds} seconds before it is due; last comes for how
-- many seconds the first of it should have been.
SELECT \
  (SELECT count(*) FROM (SELECT 1 FROM {message} FORCE INDEX ({ready_index}) \
  WHERE claimable = 1 AND queue = :queue AND priority = :priority \
    AND next_attempt_at <= UTC_TIMESTAMP(6)
  ORDER BY next_attempt_at LIMIT :most_due) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM {message} FORCE INDEX ({ready_index}) \
  WHERE claimable = 1 AND queue = :queue AND priority = :priority \
    AND next_attempt_at > UTC_TIMESTAMP(6) AND next_attempt_at < '{standby_time}'
  ORDER BY next_attempt_at LIMIT :most_later) AS found),
  (SELECT count(*) FROM (SELECT 1 FROM {message} FORCE INDEX ({ready_index}) \
  WHERE claimable = 1 AND queue = :queue AND priority = :priority \
    AND next_attempt_at >= '{standby_time}' \
    AND (policy_marks & {held_burst}) > 0
  ORDER BY next_attempt_at LIMIT :most_standing) AS found),
  (SELECT TIMESTAMPDIFF(MICROSECOND, next_attempt_at, UTC_TIMESTAMP(6)) / 1000000 \
    + {standby_seconds} FROM {message} FORCE INDEX ({ready_index}) \
  WHERE claimable = 1 AND queue = :queue AND priority = :priority \
    AND next_attempt_at >= '{standby_time}' \
    AND (policy_marks & {held_burst}) > 0
  ORDER BY next_attempt_at LIMIT 1)
