SELECT count(*) FROM (SELECT 1 FROM message WHERE queue = :queue AND state = 'PROCESSING' LIMIT 500000) AS found
