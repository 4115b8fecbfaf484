-- Finds the first queue behind :after that has a message, for metrics and overviews.
-- A step from each name to the next, in an index: DISTINCT would read every message.
-- There are no partial indexes. That of leases has every message, so one walk finds all queues.
SELECT queue FROM {message} FORCE INDEX ({leased_index}) \
WHERE queue > :after \
ORDER BY queue LIMIT 1
