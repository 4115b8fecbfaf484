-- Counts leased messages of a queue up to :most, and those that had an attempt.
-- Overviews send it. The range is one of an index, in its order, and is left at the limit.
-- Python joins up to 20 of these by UNION ALL: it puts the number of the range behind the first
-- SELECT, which must begin the text, and behind the names of the binds.
SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END)
FROM (SELECT state FROM {message} FORCE INDEX ({leased_index}) \
  WHERE queue = :queue AND lease_expires_at IS NOT NULL \
  ORDER BY lease_expires_at LIMIT :most) AS found
