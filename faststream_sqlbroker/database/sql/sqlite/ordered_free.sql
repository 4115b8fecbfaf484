-- variants: by_header, others, others by_header
-- :queue varchar :priority smallint :mask smallint :id bigint :size int :final int :losses int
-- Searches a page of due messages for such without a key, from where the last claim has stopped. It
-- is sent if the window of `ordered_window` was full and gave too few.
WITH w AS (
  SELECT m.id, m.{key_column} AS k, m.next_attempt_at AS due
  FROM {message} m INDEXED BY {ready_index}
  WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') \
    AND m.next_attempt_at <= {now}
    AND (m.policy_marks & :mask) >= :mask AND (m.next_attempt_at, m.id) > (:due, :id)
    -- The claim skips suspects, as `claim_others` does.
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  ORDER BY m.next_attempt_at, m.id LIMIT :size
)
SELECT w.id, w.due, CASE WHEN w.k IS NULL THEN 1 ELSE 0 END AS free \
FROM w \
ORDER BY w.due, w.id
