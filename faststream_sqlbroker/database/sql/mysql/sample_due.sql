-- Counts due messages of a queue and priority up to :most, those that had an attempt, and suspects.
-- Overviews send it. The range is one of an index, in its order, and is left at the limit.
-- Python joins up to 20 of these by UNION ALL: it puts the number of the range behind the first
-- SELECT, which must begin the text, and behind the names of the binds.
SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count >= {suspect_after} THEN 1 END)
FROM (SELECT state, attempts_count, deliveries_count FROM {message} FORCE INDEX ({ready_index}) \
  WHERE claimable = 1 AND queue = :queue AND priority = :priority \
    AND next_attempt_at <= UTC_TIMESTAMP(6) \
  ORDER BY next_attempt_at LIMIT :most) AS found
