EXPLAIN SELECT 1 FROM message_archive WHERE queue = :queue
