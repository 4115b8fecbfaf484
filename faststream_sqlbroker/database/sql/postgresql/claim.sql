-- variants: apart, others, two_lengths, apart two_lengths, others two_lengths
-- :queues varchar[] :priorities smallint[] :since time[] :limit int :token uuid :lease float
-- :free int :waiting float :final int :losses int
-- Leases up to `limit` due messages, pair of queue and priority by pair.
-- Pairs are walked lazily, until there are enough messages. RETURNING has no order, so the client
-- sorts them.
-- others skips suspects, the messages that may have killed their process. apart locks suspects, but
-- does not lease them: it returns their ids and counts, and NULL for all else.
-- two_lengths leases the first `free` messages for `lease` seconds, and the others, which wait for
-- a worker, for `waiting`. It also returns whether a message got the shorter lease.
WITH r AS MATERIALIZED (
  SELECT x.*
  FROM unnest(:queues, :priorities, :since) WITH ORDINALITY AS p(queue, priority, since, ord)
  CROSS JOIN LATERAL (
    SELECT m.ctid AS c \  --? !apart
    SELECT m.ctid AS c, m.id, m.attempts_count, m.deliveries_count,  --? apart
      (m.deliveries_count - m.attempts_count BETWEEN :losses AND :final) AS suspect \  --? apart
    FROM {message} m
    -- States are literals: with bound ones a generic plan could not use the partial index.
    WHERE m.queue = p.queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
      AND m.next_attempt_at BETWEEN coalesce(p.since, '-infinity') AND statement_timestamp()
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
    ORDER BY m.next_attempt_at, m.id LIMIT :limit FOR UPDATE SKIP LOCKED) x
  LIMIT :limit
), u AS (  --? apart
)  --? !apart
-- By ctid: joined on id, the planner chose a sequential scan at 20 000 rows.
UPDATE {message} m
SET state = 'PROCESSING', acquired_at = statement_timestamp(), lease_token = :token,
  lease_expires_at = statement_timestamp() + \
    :lease * interval '1 second',  --? !two_lengths
    CASE  --? two_lengths
    WHEN m.ctid = ANY(ARRAY(SELECT r.c FROM r \  --? two_lengths
      WHERE NOT r.suspect \  --? apart two_lengths
      LIMIT :free))  --? two_lengths
    THEN :lease ELSE :waiting END * interval '1 second',  --? two_lengths
  deliveries_count = m.deliveries_count + 1
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))  --? !apart
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r WHERE NOT r.suspect))  --? apart
RETURNING {claimed}  --? !two_lengths
RETURNING {claimed},  --? two_lengths
  m.lease_expires_at < m.acquired_at + :lease * interval '1 second'  --? two_lengths
)  --? apart
SELECT * FROM u  --? apart
UNION ALL  --? apart
SELECT r.id, NULL, NULL, NULL, NULL, NULL, r.attempts_count, r.deliveries_count, \  --? apart
  NULL, \  --? apart two_lengths
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL \  --? apart
FROM r WHERE r.suspect  --? apart
