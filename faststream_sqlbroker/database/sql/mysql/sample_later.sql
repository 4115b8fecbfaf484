-- Counts what is due later of a queue and a priority up to :most, and what had an attempt.
-- Overviews send it. The range is one of an index, in its order, and is left at the limit.
-- What stands by is due from 8970 on. A newer message of its key is delivered in its place.
-- Python joins up to 20 of these by UNION ALL: it puts the number of the range behind the first
-- SELECT, which must begin the text, and behind the names of the binds.
SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END)
FROM (SELECT state FROM {message} FORCE INDEX ({ready_index}) \
  WHERE claimable = 1 AND queue = :queue AND priority = :priority \
    AND next_attempt_at > UTC_TIMESTAMP(6) AND next_attempt_at < '{standby_time}' \
  ORDER BY next_attempt_at LIMIT :most) AS found
