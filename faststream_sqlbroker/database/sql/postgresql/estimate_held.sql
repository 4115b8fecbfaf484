-- Asks the planner how many leased messages a queue has. It is sent where there are more than are
-- counted.
-- The state is a literal: partial indexes serve only conditions that name their own.
EXPLAIN SELECT 1 FROM {message} WHERE queue = :queue AND state = 'PROCESSING'
