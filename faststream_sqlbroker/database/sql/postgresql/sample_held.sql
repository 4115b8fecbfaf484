-- Counts the leased messages of a queue, up to `most`, those of them that had an attempt before, and
-- suspects, for what operators see. Several are sent as one, by UNION ALL, with numbers behind the
-- names of their binds.
-- In the order of the index: else PostgreSQL may read the table from its begin, in the hope of many
-- messages of the queue, and so messages of other queues without a limit.
-- The state is a literal: partial indexes serve only conditions that name their own.
SELECT count(*), count(CASE WHEN attempts_count > 0 THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count > {suspect_after} THEN 1 END)
FROM (SELECT attempts_count, deliveries_count FROM {message} \
WHERE queue = :queue AND state = 'PROCESSING' \
ORDER BY lease_expires_at LIMIT :most) AS found
