-- :queue varchar :priority smallint :now bigint :size int
-- Reads some of what is due, for `broker.admin.policies`. Times are whole microseconds since 1970
-- (UTC), in and out.
-- States are literals: with bound ones a generic plan could not use the partial index.
SELECT m.id, \
  CASE WHEN (m.policy_marks & {header_key}) <> 0 THEN m.policy_key ELSE m.key END, \
  (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint, m.state,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END, \
  m.policy_marks, m.attempts_count, m.deliveries_count
FROM {message} m 
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE')
  -- Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255. So
  -- whole seconds and the microseconds left are added separately.
  AND m.next_attempt_at <= (timestamptz 'epoch' \
    + (:now) / 1000000 * interval '1 second' \
    + (:now) % 1000000 * interval '1 microsecond')
ORDER BY m.next_attempt_at, m.id LIMIT :size
