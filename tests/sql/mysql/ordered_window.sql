SELECT w.id, w.`key`, (SELECT e.id FROM message e FORCE INDEX (message_key)
  WHERE e.queue = :queue AND e.`key` = w.`key` AND (e.expires_at IS NULL OR e.expires_at > UTC_TIMESTAMP(6)) ORDER BY e.id LIMIT 1) AS head
FROM (
  SELECT m.id, m.`key`, m.next_attempt_at FROM message m FORCE INDEX (message_ready)
  WHERE m.queue = :queue AND m.priority = :priority AND m.claimable = 1 AND m.next_attempt_at <= UTC_TIMESTAMP(6)
  ORDER BY m.next_attempt_at, m.id LIMIT :size) w
ORDER BY w.next_attempt_at, w.id
