-- Counts what stands by of a queue and a priority up to :most, and tells for how many seconds claims
-- should have looked at the first: that is {standby_seconds} seconds before it is due.
-- Overviews send it. The range is one of an index, in its order, and is left at the limit.
-- Python joins up to 20 of these by UNION ALL: it puts the number of the range behind the first
-- SELECT, which must begin the text, and behind the names of the binds.
SELECT count(*), coalesce(TIMESTAMPDIFF(MICROSECOND, min(next_attempt_at), UTC_TIMESTAMP(6)) \
  / 1000000 + {standby_seconds}, 0)
FROM (SELECT next_attempt_at FROM {message} FORCE INDEX ({ready_index}) \
  WHERE claimable = 1 AND queue = :queue AND priority = :priority \
    AND next_attempt_at >= '{standby_time}' \
    AND (policy_marks & {held_burst}) > 0 \
  ORDER BY next_attempt_at LIMIT :most) AS found
