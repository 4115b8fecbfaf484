WITH w AS (
  SELECT m.id, m.policy_key AS k, m.next_attempt_at AS due, CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END AS expired
  FROM message m FORCE INDEX (message_ready)
  WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 AND m.next_attempt_at <= UTC_TIMESTAMP(6)
    AND (m.policy_marks & :mask) >= :mask
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
  ORDER BY m.next_attempt_at, m.id LIMIT :size
), h AS (
  SELECT k.k, (SELECT e.id FROM message e FORCE INDEX (message_policy_key)
  WHERE e.queue = :queue AND e.policy_key = k.k AND (e.expires_at IS NULL OR e.expires_at > UTC_TIMESTAMP(6)) ORDER BY queue, policy_key, e.id LIMIT 1) AS head
  FROM (SELECT DISTINCT w.k FROM w WHERE w.k IS NOT NULL AND w.expired = 0) k
)
SELECT w.id, w.k, w.expired, w.due, h.head
FROM w LEFT JOIN h ON h.k = w.k
ORDER BY w.due, w.id
