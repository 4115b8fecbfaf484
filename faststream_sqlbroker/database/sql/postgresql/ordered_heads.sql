-- variants: by_header, others, others by_header
-- :ids bigint[] :mask smallint :final int :losses int
-- Tells which of `ids`, the first messages of their keys, can be claimed now.
-- others skips suspects, the messages that may have killed their process.
SELECT m.id, m.{key_column} FROM {message} m 
-- Trap: without fresh statistics the planner would find these rows by the index of ready ones, and
-- read all of it. No index serves a CASE.
WHERE m.id = ANY(:ids) \
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  AND (m.policy_marks & :mask) >= :mask \  --? !others
  AND (m.policy_marks & :mask) >= :mask  --? others
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \  --? others
  THEN 1 ELSE 0 END = 1
ORDER BY m.priority DESC, m.next_attempt_at, m.id
