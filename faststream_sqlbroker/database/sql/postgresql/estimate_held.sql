EXPLAIN SELECT 1 FROM {message} WHERE queue = :queue AND state = 'PROCESSING'
