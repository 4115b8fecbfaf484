-- variants: by_header, others, others by_header
-- :ids in :mask smallint :final int :losses int
-- Reads which of some messages, the first ones of their keys, can be claimed, in the order of
-- claims.
-- Keys are read as bytes: text that is not UTF-8 would fail the read.
-- No index serves a CASE: the messages are searched by their ids, never by due time.
SELECT m.id, CAST(m.{key_column} AS BLOB) FROM {message} m 
WHERE m.id IN :ids \
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= {now}
  AND (m.policy_marks & :mask) >= :mask \  --? !others
  AND (m.policy_marks & :mask) >= :mask  --? others
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \  --? others
    THEN 1 ELSE 0 END = 1
ORDER BY m.priority DESC, m.next_attempt_at, m.id
