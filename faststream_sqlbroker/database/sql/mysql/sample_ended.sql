-- Counts archived messages of a queue up to :most, newest first, and those that were completed.
-- Overviews of jobs send it. The queue is a range of one name, and in the order: where it equals a
-- value, PostgreSQL drops it from the order, and may walk the times of all queues.
-- Python joins up to 20 of these by UNION ALL: it puts the number of the range behind the first
-- SELECT, which must begin the text, and behind the names of the binds.
SELECT count(*), count(CASE WHEN state = 'COMPLETED' THEN 1 END)
FROM (SELECT state FROM {archive} FORCE INDEX ({archive_queue_index}) \
  WHERE queue >= :queue AND queue <= :queue
ORDER BY queue DESC, archived_at DESC LIMIT :most) AS found
