-- :queue varchar
-- Reads the replies to requests, from the queue that this process has for itself.
-- No other process reads the queue, so a reply needs no lease: `delete` removes it later, by id.
-- `claimable`, which leads the index, is 1 or NULL.
SELECT {claimed}
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.claimable = 1 AND m.queue = :queue AND m.next_attempt_at <= UTC_TIMESTAMP(6)
LIMIT {max_replies}
