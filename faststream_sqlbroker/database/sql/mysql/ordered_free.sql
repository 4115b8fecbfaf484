-- variants: by_header, others, others by_header
-- :queue varchar :priority smallint :mask smallint :id bigint :size int :final int :losses int
-- Reads the next page of due messages of a queue and priority, and which of them have no key.
-- It is sent if `ordered_window` was full and gave too few messages. It begins where the last claim
-- of this process has stopped. A message without a key waits for no other.
-- The index is named so that the scan uses it; `claimable`, which leads it, is 1 or NULL.
WITH w AS (
  SELECT m.id, m.{key_column} AS k, m.next_attempt_at AS due
  FROM {message} m FORCE INDEX ({ready_index})
  WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 \
    AND m.next_attempt_at <= UTC_TIMESTAMP(6)
    -- Behind :due and :id: the second half would say it alone, but is no range of the index.
    AND (m.policy_marks & :mask) >= :mask \
    AND m.next_attempt_at >= :due AND (m.next_attempt_at > :due OR m.id > :id)
    -- `others` skips suspects: they may have killed their process, or are on their last delivery.
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  ORDER BY m.next_attempt_at, m.id LIMIT :size
)
SELECT w.id, w.due, CASE WHEN w.k IS NULL THEN 1 ELSE 0 END AS free \
FROM w \
ORDER BY w.due, w.id
