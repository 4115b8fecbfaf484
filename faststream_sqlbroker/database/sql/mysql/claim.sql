-- variants: others
SELECT {claimed}
FROM {message} FORCE INDEX ({ready_index})
WHERE claimable = 1 AND queue = :queue AND priority = :priority
  AND next_attempt_at <= UTC_TIMESTAMP(6)
    AND NOT (deliveries_count = :final  --? others
      OR deliveries_count < :final AND deliveries_count - attempts_count >= :losses)  --? others
ORDER BY next_attempt_at, id LIMIT :limit FOR UPDATE SKIP LOCKED
