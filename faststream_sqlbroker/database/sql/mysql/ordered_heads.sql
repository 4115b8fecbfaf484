-- variants: by_header, others, others by_header
-- :ids in :mask smallint :final int :losses int
-- Reads which of these messages can be claimed now, and their keys, in the order of claims.
-- The others of them wait for their time, or have been claimed.
-- Without the hint the server scans a small table.
SELECT m.id, m.{key_column} FROM {message} m FORCE INDEX (PRIMARY)
-- No index serves a CASE: only the ids can find the rows, not the index of ready messages.
WHERE m.id IN :ids \
  AND CASE WHEN m.claimable = 1 AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  AND (m.policy_marks & :mask) >= :mask \  --? !others
  AND (m.policy_marks & :mask) >= :mask  --? others
    -- `others` skips suspects: they may have killed their process, or are on their last delivery.
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \  --? others
    THEN 1 ELSE 0 END = 1
ORDER BY m.priority DESC, m.next_attempt_at, m.id
