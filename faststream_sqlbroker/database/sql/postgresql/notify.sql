-- :channel text :queues varchar[]
SELECT pg_notify(:channel, q) FROM unnest(:queues) AS q
