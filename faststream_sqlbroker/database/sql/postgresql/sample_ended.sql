-- Counts the archived messages of a queue, up to `most`, the newest first, and those of them that
-- were completed. Several are sent as one, by UNION ALL, with numbers behind the names of their
-- binds.
-- Trap: PostgreSQL drops a column that equals a value from the order, and may then walk the times
-- of all queues in the hope of many rows of this one. So the queue is a range of one name, by which
-- the rows are ordered.
SELECT count(*), count(CASE WHEN state = 'COMPLETED' THEN 1 END)
FROM (SELECT state FROM {archive} WHERE queue >= :queue AND queue <= :queue
ORDER BY queue DESC, archived_at DESC LIMIT :most) AS found
