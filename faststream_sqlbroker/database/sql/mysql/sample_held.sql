-- Counts leased messages of a queue up to :most, those that had an attempt before, and suspects.
-- Overviews send it. The range is one of an index, in its order, and is left at the limit.
-- Python joins up to 20 of these by UNION ALL: it puts the number of the range behind the first
-- SELECT, which must begin the text, and behind the names of the binds.
SELECT count(*), count(CASE WHEN attempts_count > 0 THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count > {suspect_after} THEN 1 END)
FROM (SELECT attempts_count, deliveries_count FROM {message} FORCE INDEX ({leased_index}) \
  WHERE queue = :queue AND lease_expires_at IS NOT NULL \
  ORDER BY lease_expires_at LIMIT :most) AS found
