-- :queue varchar :one int :gone int :limit int :bytes bigint
-- Reads the first page of the due jobs of a pull consumer's queue, and whether its first lease has
-- ended. With `gone` it also reads jobs that have expired long ago, so that they can be ended.
-- Priorities are walked lazily, until `limit` jobs are found.
-- States are literals: with bound ones a generic plan could not use the partial indexes.
WITH RECURSIVE p(priority) AS (
  SELECT (SELECT m.priority FROM {message} m
    WHERE m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  -- The count always holds (`one` is 1), and has this planned anew each time: without the value the
  -- planner expects a million rows of the two series, so a generic plan always seems to cost more.
  -- A paused queue has no page.
  WHERE (SELECT count(*)
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0 \
    AND NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.key = :queue
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp()))
  UNION ALL
  SELECT (SELECT m.priority FROM {message} m
    WHERE m.queue = :queue AND m.priority < p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
), d AS MATERIALIZED (
  SELECT x.* FROM p CROSS JOIN LATERAL (
    SELECT m.id, m.priority, m.next_attempt_at, m.deliveries_count, m.headers, m.payload,
      NOT coalesce(m.expires_at > statement_timestamp(), true) AS gone
    FROM {message} m
    WHERE m.queue = :queue AND m.priority = p.priority AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= statement_timestamp()
    AND (coalesce(m.expires_at > statement_timestamp(), true) \
      OR :gone = 1 AND m.expires_at <= statement_timestamp() - interval '{long_ago} seconds')
    ORDER BY m.next_attempt_at, m.id LIMIT :limit) x
  LIMIT :limit
), s AS (
  SELECT d.*, sum(octet_length(d.payload)) OVER place AS size, row_number() OVER place AS number
  FROM d WINDOW place AS (ORDER BY d.priority DESC, d.next_attempt_at, d.id)
)
SELECT s.id, s.priority, s.next_attempt_at, s.deliveries_count, s.headers::text,
  -- No page reads bodies that it does not show: of a large body only its length is known before.
  CASE WHEN s.number = 1 OR s.size <= :bytes THEN s.payload END,
  coalesce((SELECT m.lease_expires_at <= statement_timestamp() FROM {message} m
    WHERE m.queue = :queue AND m.state = 'PROCESSING'
    ORDER BY m.lease_expires_at LIMIT 1), false), s.gone
-- Also without a job, so that the ended lease is told.
FROM (SELECT 1) AS at_least_one_row LEFT JOIN s ON true
ORDER BY s.number
