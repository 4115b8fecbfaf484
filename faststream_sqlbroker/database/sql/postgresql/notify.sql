-- :channel text :queues varchar[]
-- Wakes the processes that listen on `channel`, once for each queue.
SELECT pg_notify(:channel, q) FROM unnest(:queues) AS q
