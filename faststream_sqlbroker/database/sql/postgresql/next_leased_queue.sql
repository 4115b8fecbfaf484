-- Finds the next queue behind `after`, by name, that has a leased message.
-- A step from each name to the next, in an index: DISTINCT would read every message.
-- The state is a literal: partial indexes serve only conditions that name their own.
SELECT queue FROM {message} \
WHERE state = 'PROCESSING' AND queue > :after \
ORDER BY queue LIMIT 1
