-- variants: by_header
-- :queue varchar :priority smallint :now bigint :size int
-- Reads what stands by in a queue and priority, and is to be looked at by :now, in that order.
-- What stands by for a newer message of its key has the mark {held_burst}.
-- It is due {standby} microseconds later than it would be, and :now counts from there.
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
-- Another program may write created_at by a clock that is ahead. No message arrives after now.
SELECT m.id, m.{key_column}, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at),
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', LEAST(m.created_at, UTC_TIMESTAMP(6)))
-- The index is named so that the scan uses it; `claimable`, which leads it, is 1 or NULL.
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 \
  AND m.next_attempt_at \
    >= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL {standby} MICROSECOND) \
  AND (m.policy_marks & {held_burst}) > 0
  AND m.next_attempt_at <= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL :now MICROSECOND)
ORDER BY m.next_attempt_at, m.id LIMIT :size
