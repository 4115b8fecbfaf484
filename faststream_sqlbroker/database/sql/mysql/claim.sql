-- variants: others
-- Locks and reads the first due messages of a queue and a priority; `claim_update` leases them.
-- There is no UPDATE ... RETURNING, so a claim locks and reads, then updates by id.
-- There are no partial indexes: `claimable`, which leads the index, is generated, 1 or NULL.
-- `state IN (...)` ahead of the order would sort the whole queue.
SELECT {claimed}
FROM {message} FORCE INDEX ({ready_index})
WHERE claimable = 1 AND queue = :queue AND priority = :priority
  AND next_attempt_at <= UTC_TIMESTAMP(6)
    -- `others` skips suspects: they may have killed their process, or are on their last delivery.
    AND deliveries_count - attempts_count NOT BETWEEN :losses AND :final  --? others
-- What another transaction has locked is skipped.
ORDER BY next_attempt_at, id LIMIT :limit FOR UPDATE SKIP LOCKED
