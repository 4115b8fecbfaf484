-- variants: by_header
-- :queue varchar :priority smallint :since bigint :before int :own int :size int
-- Reads due messages of a queue and priority that a policy has not seen; claims send it first.
-- They have the marks of the policies before (:before), and lack the policy's own (:own).
-- With :own = 0 it finds all that has become due since the last look.
-- The look begins (:since) before the end of the last one, to find rows that were committed late.
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
-- Another program may write created_at by a clock that is ahead. No message arrives after now.
-- The sum tells whether the message was delivered before, or let in by a Throttle.
SELECT m.id, m.{key_column}, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at), \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', LEAST(m.created_at, UTC_TIMESTAMP(6))),
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END, \
  m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), m.policy_marks
-- The index is named so that the scan uses it; `claimable`, which leads it, is 1 or NULL.
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 \
  AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  AND m.next_attempt_at >= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL :since MICROSECOND) \
  AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY m.next_attempt_at, m.id LIMIT :size
