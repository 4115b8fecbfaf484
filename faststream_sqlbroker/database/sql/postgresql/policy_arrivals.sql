-- variants: by_header
-- :queue varchar :priority smallint :since bigint :before int :own int :size int
-- Reads due messages that a policy has not seen yet: those that have the marks `before` and not
-- `own`. Times are whole microseconds since 1970 (UTC), in and out.
-- Another program may write created_at by a clock that is ahead. No message arrives after now.
-- States are literals: with bound ones a generic plan could not use the partial index.
SELECT m.id, m.{key_column}, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint, \
  (extract(epoch FROM LEAST(m.created_at, statement_timestamp())) * 1000000)::bigint,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END, \
  m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), m.policy_marks
FROM {message} m 
WHERE m.queue = :queue AND m.priority = :priority \
  AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  -- Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255. So
  -- whole seconds and the microseconds left are added separately.
  AND m.next_attempt_at >= (timestamptz 'epoch' \
    + (:since) / 1000000 * interval '1 second' \
    + (:since) % 1000000 * interval '1 microsecond') \
  AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY m.next_attempt_at, m.id LIMIT :size
