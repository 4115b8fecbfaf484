-- Finds the next queue behind `after`, by name, that has a message which waits.
-- A step from each name to the next, in an index: DISTINCT would read every message.
-- States are literals: partial indexes serve only conditions that name their own.
SELECT queue FROM {message} \
WHERE state IN ('PENDING', 'RETRYABLE') AND queue > :after \
ORDER BY queue LIMIT 1
