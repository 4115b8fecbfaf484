-- variants: by_header, one, one by_header, others, others by_header
-- :queue varchar :priority smallint :now bigint :before int :size int :final int :losses int
-- :only bigint
-- Reads messages that a claim under policies may choose from: due when it began (`now`), with the
-- marks `before` of all its policies. Times are whole microseconds since 1970 (UTC), in and out.
-- one asks about one message.
-- others skips suspects, the messages that may have killed their process.
-- States are literals: with bound ones a generic plan could not use the partial index.
SELECT m.id, m.{key_column}, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint
FROM {message} m 
WHERE m.queue = :queue AND m.priority = :priority \
  AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  -- A burst that has ended since `now` may lack what arrived after the policies looked, and before
  -- its end.
  -- Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255. So
  -- whole seconds and the microseconds left are added separately.
  AND m.next_attempt_at <= (timestamptz 'epoch' \
    + (:now) / 1000000 * interval '1 second' \
    + (:now) % 1000000 * interval '1 microsecond') \
  AND (m.policy_marks & :before) >= :before
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  AND m.id = :only  --? one
ORDER BY m.next_attempt_at, m.id LIMIT :size
