-- Counts a queue's last archived messages, and the completed ones of them, up to `:most`, for what
-- operators see of jobs.
-- `sample_all` joins several of these by UNION ALL. It removes the first word, and gives `:queue` a
-- number.
SELECT count(*), count(CASE WHEN state = 'COMPLETED' THEN 1 END)
-- A range of one name, ordered by it, as on PostgreSQL: it drops a column that equals a value from
-- the order, and may then walk the times of all queues.
FROM (SELECT state FROM {archive} WHERE queue >= :queue AND queue <= :queue
ORDER BY queue DESC, archived_at DESC LIMIT :most) AS found
