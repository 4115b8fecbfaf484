-- :token uuid :lease float :job bigint :one int :queue varchar :channel varchar :consumer varchar
-- Leases one job for a pull consumer. It returns nothing if the job is not queued, due and free, or
-- its queue is paused or no pull consumer's. Then a transaction of several statements finds out
-- which of these it was.
UPDATE {message} m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + :lease * interval '1 second',
  deliveries_count = m.deliveries_count + 1
-- The count always holds (`one` is 1), and has this planned anew each time: without the value the
-- planner expects a million rows of the two series, so a generic plan always seems to cost more.
-- Trap: without fresh statistics the planner takes another index than that of ids, and reads all
-- rows of a deep queue. No index serves a CASE.
WHERE m.id = :job AND (SELECT count(*)
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0 \
  AND CASE WHEN m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= statement_timestamp()
    AND coalesce(m.expires_at > statement_timestamp(), true)
    AND NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.key = :queue
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp()))
    AND EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = :channel AND s.key = :consumer AND s.info ->> 'type' = 'pull')
    THEN true ELSE false END
RETURNING {claimed}
