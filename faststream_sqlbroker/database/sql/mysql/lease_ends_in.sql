-- :queues in
-- Reads in how many seconds the first lease in the queues ends: less than 0 if it has ended.
-- It reads what is leased in the index, and nothing else.
-- The queues are constants: with a join MySQL would read all rows of a queue without a lease.
SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(lease_expires_at)) / 1000000
FROM {message} FORCE INDEX ({leased_index})
WHERE queue IN :queues AND lease_expires_at IS NOT NULL
