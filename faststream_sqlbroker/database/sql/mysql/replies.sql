-- :queue varchar
SELECT {claimed}
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.claimable = 1 AND m.queue = :queue AND m.next_attempt_at <= UTC_TIMESTAMP(6)
LIMIT {most_read}
