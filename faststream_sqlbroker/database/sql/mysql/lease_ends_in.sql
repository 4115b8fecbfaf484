-- :queues in
SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(lease_expires_at)) / 1000000
FROM {message} FORCE INDEX ({leased_index})
WHERE queue IN :queues AND lease_expires_at IS NOT NULL
