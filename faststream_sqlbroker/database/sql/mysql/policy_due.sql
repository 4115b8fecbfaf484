-- variants: by_header, one, one by_header, others, others by_header
-- :queue varchar :priority smallint :now bigint :before int :size int :final int :losses int
-- :only bigint
-- Reads the first due messages of a queue and priority that all policies have seen, for a claim.
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
SELECT m.id, m.{key_column}, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at)
-- The index is named so that the scan uses it; `claimable`, which leads it, is 1 or NULL.
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 \
  AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  -- Due by :now, when the claim began: a burst that has ended since may lack what arrived after the
  -- policies looked, and before its end.
  AND m.next_attempt_at <= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL :now MICROSECOND) \
  AND (m.policy_marks & :before) >= :before
    -- `others` skips suspects: they may have killed their process, or are on their last delivery.
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  AND m.id = :only  --? one
ORDER BY m.next_attempt_at, m.id LIMIT :size
