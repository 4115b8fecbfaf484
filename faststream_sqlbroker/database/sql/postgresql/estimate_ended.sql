EXPLAIN SELECT 1 FROM {archive} WHERE queue = :queue
