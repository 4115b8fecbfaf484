WITH RECURSIVE q AS (
  SELECT q.place, q.queue, \
    (SELECT m.priority FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = q.queue \
      ORDER BY m.claimable DESC, m.queue DESC, m.priority DESC, \
      m.next_attempt_at DESC, m.id DESC LIMIT 1) AS top
  FROM JSON_TABLE(:queues, '$[*]' COLUMNS (place FOR ORDINALITY, \
    queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$')) q
  WHERE NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.`key` = q.queue \
      AND (s.expires_at IS NULL OR s.expires_at > UTC_TIMESTAMP(6)))
), p AS (
  SELECT q.place, q.queue, q.top AS priority, \
    (SELECT m.priority FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = q.queue \
      ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id \
      LIMIT 1) AS bottom
  FROM q WHERE q.top IS NOT NULL
  UNION ALL
  SELECT p.place, p.queue, p.priority - 1, p.bottom FROM p WHERE p.priority > p.bottom
)
SELECT p.queue, p.priority, \
  TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), \
  (SELECT IF(m.next_attempt_at < '1000-01-01', '1000-01-01', m.next_attempt_at) \
  FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority \
      ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id \
      LIMIT 1)) / 1000000
FROM p ORDER BY p.place, p.priority DESC
