-- Asks the planner how many archived messages a queue has. It is sent where there are more than are
-- counted.
EXPLAIN SELECT 1 FROM {archive} WHERE queue = :queue
