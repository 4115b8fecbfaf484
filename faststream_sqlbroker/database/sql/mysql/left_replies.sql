-- :queue varchar :everything int
-- Finds expired replies in a queue of replies, or with :everything = 1 all of them, to remove them.
-- The heartbeat of any process sends it; the queue of a process that has ended is emptied.
SELECT m.id
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.claimable = 1 AND m.queue = :queue \
  AND (m.expires_at < UTC_TIMESTAMP(6) OR :everything = 1)
LIMIT {max_replies}
