-- :queues varchar[] :before time :limit int
-- Gives back up to `limit` messages whose lease ended before that moment (NULL: by now). Rows that
-- another transaction has locked are skipped.
-- The state is a literal: with a bound one a generic plan could not use the partial index.
WITH r AS MATERIALIZED (
  SELECT x.c FROM unnest(:queues) AS q(queue)
  CROSS JOIN LATERAL (
    SELECT m.ctid AS c FROM {message} m
    WHERE m.queue = q.queue AND m.state = 'PROCESSING' \
      AND m.lease_expires_at < COALESCE(:before, statement_timestamp())
    ORDER BY m.lease_expires_at LIMIT :limit FOR UPDATE SKIP LOCKED) x
  LIMIT :limit
)
-- By ctid: joined on id, the planner chose a sequential scan at 20 000 rows.
UPDATE {message} m
SET state = CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = m.policy_marks & {kept_marks}
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING m.id
