SELECT count(*), count(CASE WHEN state = 'COMPLETED' THEN 1 END)
FROM (SELECT state FROM message_archive FORCE INDEX (message_archive_queue) WHERE queue >= :queue AND queue <= :queue
ORDER BY queue DESC, archived_at DESC LIMIT :most) AS found
