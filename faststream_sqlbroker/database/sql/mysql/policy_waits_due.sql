-- :queue varchar :priority smallint :now bigint :size int
-- Reads the first due messages of a queue and priority, for `broker.admin.policies`.
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
-- A message has the key of its headers, if it was read from there: the mark says so.
SELECT m.id, \
  CASE WHEN (m.policy_marks & {header_key}) <> 0 THEN m.policy_key ELSE m.`key` END, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at), m.state,
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END, \
  m.policy_marks, m.attempts_count, m.deliveries_count
-- The index is named so that the scan uses it; `claimable`, which leads it, is 1 or NULL.
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1
  AND m.next_attempt_at <= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL :now MICROSECOND)
ORDER BY m.next_attempt_at, m.id LIMIT :size
