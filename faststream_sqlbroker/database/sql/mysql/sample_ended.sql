SELECT count(*), count(CASE WHEN state = 'COMPLETED' THEN 1 END)
FROM (SELECT state FROM {archive} FORCE INDEX ({archive_queue_index}) \
  WHERE queue >= :queue AND queue <= :queue
ORDER BY queue DESC, archived_at DESC LIMIT :most) AS found
