SELECT count(*) FROM (SELECT 1 FROM message_archive WHERE queue = :queue LIMIT 500000) AS found
