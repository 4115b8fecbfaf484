-- variants: by_header, others, others by_header
-- :queue varchar :priority smallint :mask smallint :due time :id bigint :size int :final int
-- :losses int
-- Reads the next page of due messages, from where the last claim stopped, and tells which of them
-- have no key. It is sent where the window (`ordered_window`) was full and gave too few heads.
-- others skips suspects, the messages that may have killed their process.
-- States are literals: with bound ones a generic plan could not use the partial index.
WITH w AS (
  SELECT m.id, m.{key_column} AS k, m.next_attempt_at AS due
  FROM {message} m 
  WHERE m.queue = :queue AND m.priority = :priority \
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    AND (m.policy_marks & :mask) >= :mask AND (m.next_attempt_at, m.id) > (:due, :id)
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  ORDER BY m.next_attempt_at, m.id LIMIT :size
)
SELECT w.id, w.due, CASE WHEN w.k IS NULL THEN 1 ELSE 0 END AS free \
FROM w ORDER BY w.due, w.id
