-- variants: by_header
-- :queue varchar :priority smallint :now bigint :size int
-- Reads messages that stand by for a newer one of their key and are to be looked at by `now`. Times
-- are whole microseconds since 1970 (UTC), in and out, with what is added to the due time of a
-- message while it stands by.
-- Another program may write created_at by a clock that is ahead. No message arrives after now.
-- Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255. So
-- whole seconds and the microseconds left are added separately.
-- States are literals: with bound ones a generic plan could not use the partial index.
SELECT m.id, m.{key_column}, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END, \
  (extract(epoch FROM LEAST(m.created_at, statement_timestamp())) * 1000000)::bigint
FROM {message} m 
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') \
  AND m.next_attempt_at >= (timestamptz 'epoch' \
    + ({standby}) / 1000000 * interval '1 second' \
    + ({standby}) % 1000000 * interval '1 microsecond') \
  AND (m.policy_marks & {held_burst}) > 0
  AND m.next_attempt_at <= (timestamptz 'epoch' \
    + (:now) / 1000000 * interval '1 second' \
    + (:now) % 1000000 * interval '1 microsecond')
ORDER BY m.next_attempt_at, m.id LIMIT :size
