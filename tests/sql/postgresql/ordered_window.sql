SELECT w.id, w.key, (SELECT e.id FROM message e 
  WHERE e.queue = :queue AND e.key = w.key AND (e.expires_at IS NULL OR e.expires_at > statement_timestamp()) ORDER BY e.id LIMIT 1) AS head
FROM (
  SELECT m.id, m.key, m.next_attempt_at FROM message m 
  WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  ORDER BY m.next_attempt_at, m.id LIMIT :size) w
ORDER BY w.next_attempt_at, w.id
