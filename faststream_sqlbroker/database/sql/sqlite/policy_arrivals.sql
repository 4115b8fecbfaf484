-- variants: by_header
-- :queue varchar :priority smallint :since bigint :before int :own int :size int
-- Reads the due messages of a queue and priority that the policies before have seen, and this one
-- has not. With an `:own` of 0 it reads all that became due since `:since`.
-- The key is read as bytes: text that is not UTF-8 would fail the read.
-- MIN: another program may write created_at by a clock that is ahead, or text, which sorts after
-- all numbers. No message arrives after now.
-- The sum is more than 0 if the message was delivered before, or a Throttle has let it in.
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at, MIN(m.created_at, {now}),
  CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END, \
  m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), m.policy_marks
FROM {message} m INDEXED BY {ready_index}
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') \
  AND m.next_attempt_at <= {now}
  AND m.next_attempt_at >= :since AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY m.next_attempt_at, m.id LIMIT :size
